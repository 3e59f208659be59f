// What a player holds down: keyboard, buttons on the page, gamepad. All of them together count.

import { element } from "./dom.js";

const NAMED = {
  up: ["ArrowUp", "KeyW"],
  down: ["ArrowDown", "KeyS"],
  left: ["ArrowLeft", "KeyA"],
  right: ["ArrowRight", "KeyD"],
};
const ARROWS = { up: "↑", down: "↓", left: "←", right: "→" };
// Buttons of the standard gamepad, and which way of its left stick is meant.
const GAMEPAD = { up: [12, 1, -1], down: [13, 1, 1], left: [14, 0, -1], right: [15, 0, 1] };
const STICK = 0.4;

export class WorldInput {
  // onChange({keys, axes}) when something else is held than before.
  constructor(pad, onChange) {
    this.pad = pad;
    this.onChange = onChange;
    this.codes = new Map(); // of the keyboard -> the world's key
    this.keys = [];
    this.axes = [];
    this.sources = { keyboard: new Set(), page: new Set(), gamepad: new Set() };
    this.sticks = {};
    this.told = "";
    addEventListener("keydown", (event) => this.#key(event, true));
    addEventListener("keyup", (event) => this.#key(event, false));
    // A key that is let go of elsewhere is not told here.
    addEventListener("blur", () => this.release());
    document.addEventListener("visibilitychange", () => document.hidden && this.release());
    addEventListener("gamepadconnected", () => this.#look());
  }

  // The keys and axes of a world, and the buttons for them.
  use({ keys, axes }) {
    if (String(this.keys) === String(keys) && String(this.axes) === String(axes)) return;
    this.keys = keys;
    this.axes = axes;
    this.codes.clear();
    let digit = 1;
    for (const key of keys) {
      const codes = NAMED[key] ?? (digit < 10 ? [`Digit${digit++}`] : []);
      for (const code of codes) this.codes.set(code, key);
    }
    this.pad.classList.toggle("cross", ["up", "down", "left", "right"].every((key) => keys.includes(key)) && keys.length === 4);
    this.pad.replaceChildren(...keys.map((key) => this.#button(key)));
  }

  get held() {
    const { keyboard, page, gamepad } = this.sources;
    const keys = this.keys.filter((key) => keyboard.has(key) || page.has(key) || gamepad.has(key));
    return { keys, axes: { ...this.sticks } };
  }

  release() {
    for (const held of Object.values(this.sources)) held.clear();
    this.sticks = {};
    this.#changed();
  }

  #button(key) {
    const button = element("button", { type: "button", text: ARROWS[key] ?? key, "aria-label": key, "aria-pressed": "false", "data-key": key });
    const hold = (down) => {
      if (down) this.sources.page.add(key);
      else this.sources.page.delete(key);
      this.#changed();
    };
    button.addEventListener("pointerdown", (event) => {
      button.setPointerCapture(event.pointerId);
      hold(true);
    });
    for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) button.addEventListener(end, () => hold(false));
    button.addEventListener("contextmenu", (event) => event.preventDefault());
    return button;
  }

  #key(event, down) {
    const key = this.codes.get(event.code);
    if (key === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest?.("input, select, textarea")) return;
    event.preventDefault();
    if (down) this.sources.keyboard.add(key);
    else this.sources.keyboard.delete(key);
    this.#changed();
  }

  // A gamepad says nothing by itself: it is looked at while there is one.
  #look() {
    const pad = navigator.getGamepads().find((one) => one !== null);
    const held = this.sources.gamepad;
    held.clear();
    this.sticks = {};
    if (pad) {
      for (const [key, [button, axis, way]] of Object.entries(GAMEPAD)) {
        if (pad.buttons[button]?.pressed || pad.axes[axis] * way > STICK) held.add(key);
      }
      // The sticks that are no keys are the world's axes, in order.
      const first = this.keys.includes("left") ? 2 : 0;
      this.axes.forEach((name, index) => {
        const value = pad.axes[first + index] ?? 0;
        if (Math.abs(value) > 0.1) this.sticks[name] = Math.round(value * 100) / 100;
      });
      requestAnimationFrame(() => this.#look());
    }
    this.#changed();
  }

  #changed() {
    const held = this.held;
    const told = JSON.stringify(held);
    if (told === this.told) return;
    this.told = told;
    for (const button of this.pad.children) button.setAttribute("aria-pressed", String(held.keys.includes(button.dataset.key)));
    this.onChange(held);
  }
}
