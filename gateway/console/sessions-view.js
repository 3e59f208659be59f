// The table of sessions: sorted, with a button for each thing that an operator does.

import { element, setText } from "./dom.js";
import { duration, size } from "./units.js";

const $ = (id) => document.getElementById(id);

const CLOCKS = { idle_left_s: "idle", age_left_s: "age", grace_left_s: "grace" };
const ACTIONS = { park: "Park", restore: "Restore", evict: "Evict", close: "Close" };
// These end a session: they are pressed twice.
const ENDS = new Set(["evict", "close"]);

export function bytesOf(session) {
  return Object.values(session.bytes)
    .flatMap((held) => Object.values(held))
    .reduce((sum, bytes) => sum + bytes, 0);
}

// The clock that ends the session first: [seconds, its name], or null.
export function nextEnd(session) {
  const left = Object.entries(CLOCKS).filter(([name]) => typeof session[name] === "number");
  if (!left.length) return null;
  const [name] = left.reduce((one, other) => (session[other[0]] < session[one[0]] ? other : one));
  return [session[name], CLOCKS[name]];
}

const COLUMNS = [
  { name: "id", heading: "Session", by: (session) => session.id },
  { name: "pipeline", heading: "Pipeline", by: (session) => session.pipeline, text: (session) => session.pipeline },
  { name: "state", heading: "State", by: (session) => session.state, text: (session) => session.state },
  { name: "bytes", heading: "Bytes", by: bytesOf, text: (session) => size(bytesOf(session)), number: true },
  { name: "parked", heading: "Parked", by: (session) => session.parked.length, text: (session) => session.parked.join(", ") },
  { name: "idle", heading: "Idle", by: (session) => session.idle_s, text: (session) => duration(session.idle_s), number: true },
  {
    name: "ends",
    heading: "Ends in",
    by: (session) => nextEnd(session)?.[0] ?? Infinity,
    text: (session) => {
      const end = nextEnd(session);
      return end === null ? "" : `${duration(end[0])} (${end[1]})`;
    },
  },
];

export class SessionsTable {
  // onChoose(id), onAction(action, id)
  constructor({ onChoose, onAction }) {
    this.rows = new Map(); // id -> {row, cells}
    this.sessions = [];
    this.column = COLUMNS.find(({ name }) => name === "bytes");
    this.descending = true;
    this.chosen = null;
    this.#makeHeads();
    $("session-rows").addEventListener("click", ({ target }) => {
      const button = target.closest("button");
      if (button === null) return;
      const { id } = button.closest("tr").dataset;
      const { action } = button.dataset;
      if (action === undefined) onChoose(id);
      else if (ENDS.has(action) && button.dataset.armed === undefined) arm(button);
      else {
        disarm(button);
        onAction(action, id);
      }
    });
    $("session-rows").addEventListener("focusout", ({ target }) => disarm(target));
    $("session-rows").addEventListener("keydown", ({ key, target }) => {
      if (key === "Escape") disarm(target);
    });
  }

  show(sessions, total) {
    this.sessions = sessions;
    const ids = new Set(sessions.map(({ id }) => id));
    for (const [id, { row }] of this.rows) {
      if (ids.has(id)) continue;
      row.remove();
      this.rows.delete(id);
    }
    for (const session of sessions) this.#update(session);
    const body = $("session-rows");
    // Whoever is about to press a button finds it where it was.
    if (body.matches(":hover, :focus-within")) this.#append();
    else this.sort();
    $("sessions").hidden = sessions.length === 0;
    $("no-sessions").hidden = sessions.length > 0;
    $("left-out").hidden = total <= sessions.length;
    setText($("left-out"), `${total - sessions.length} more with fewer bytes are not shown.`);
  }

  find(id) {
    return this.sessions.find((session) => session.id === id);
  }

  choose(id) {
    this.chosen = id;
    for (const [known, { row, choose }] of this.rows) {
      const chosen = known === id;
      choose.setAttribute("aria-expanded", String(chosen));
      if (chosen) row.dataset.chosen = "";
      else delete row.dataset.chosen;
    }
  }

  sort() {
    const { by } = this.column;
    const sign = this.descending ? -1 : 1;
    const order = (one, other) => {
      const [a, b] = [by(one), by(other)];
      if (a === b) return one.id < other.id ? -1 : 1;
      return a < b ? -sign : sign;
    };
    const body = $("session-rows");
    [...this.sessions].sort(order).forEach(({ id }, index) => {
      const { row } = this.rows.get(id);
      if (body.children[index] !== row) body.insertBefore(row, body.children[index] ?? null);
    });
  }

  #append() {
    for (const { row } of this.rows.values()) {
      if (!row.isConnected) $("session-rows").append(row);
    }
  }

  #makeHeads() {
    for (const column of COLUMNS) {
      const button = element("button", { type: "button", text: column.heading });
      button.addEventListener("click", () => {
        // Numbers begin with the largest, names with A.
        this.descending = this.column === column ? !this.descending : column.number === true;
        this.column = column;
        this.#showOrder();
        this.sort();
      });
      column.head = element("th", { scope: "col", role: "columnheader" }, button);
      if (column.number) column.head.className = "number";
      $("session-heads").append(column.head);
    }
    const actions = element("span", { className: "visually-hidden", text: "Actions" });
    $("session-heads").append(element("th", { scope: "col", role: "columnheader" }, actions));
    this.#showOrder();
  }

  #showOrder() {
    for (const column of COLUMNS) {
      if (column === this.column) column.head.setAttribute("aria-sort", this.descending ? "descending" : "ascending");
      else column.head.removeAttribute("aria-sort");
    }
  }

  #update(session) {
    const { row, cells } = this.rows.get(session.id) ?? this.#add(session.id);
    row.dataset.state = session.state;
    for (const [column, cell] of cells) setText(cell, column.text(session));
  }

  #add(id) {
    const choose = element("button", { type: "button", text: id, "aria-expanded": String(id === this.chosen), "aria-controls": "chosen" });
    const row = element("tr", { role: "row" }, element("th", { scope: "row", role: "rowheader" }, choose));
    row.dataset.id = id;
    if (id === this.chosen) row.dataset.chosen = "";
    const cells = new Map();
    for (const column of COLUMNS.slice(1)) {
      const cell = element("td", { role: "cell", "data-label": column.heading });
      if (column.number) cell.className = "number";
      cells.set(column, cell);
      row.append(cell);
    }
    const buttons = Object.entries(ACTIONS).map(([action, words]) =>
      element("button", { type: "button", text: words, "data-action": action, "aria-label": `${words} ${id}` }),
    );
    row.append(element("td", { role: "cell" }, element("div", { className: "actions" }, ...buttons)));
    const made = { row, cells, choose };
    this.rows.set(id, made);
    return made;
  }
}

function arm(button) {
  button.dataset.armed = "";
  button.textContent = "Sure?";
  button.setAttribute("aria-label", `${ACTIONS[button.dataset.action]} it for sure? Press again`);
}

function disarm(button) {
  if (button.dataset?.armed === undefined) return;
  const words = ACTIONS[button.dataset.action];
  delete button.dataset.armed;
  button.textContent = words;
  button.setAttribute("aria-label", `${words} ${button.closest("tr").dataset.id}`);
}
