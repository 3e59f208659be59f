// The page of worlds: play one by keyboard, touch or gamepad, and see what it costs.

import { element, setText } from "./dom.js";
import { size } from "./units.js";
import { WorldInput } from "./world-input.js";
import { Refusal, WorldStream, saveKey } from "./world-stream.js";

const $ = (id) => document.getElementById(id);
const SHEET_FRAMES = 16;
const MEASURED = 256;

const state = {
  connection: "idle", // idle, connecting, connected, disconnected, ended
  playing: false,
  frame: 0,
  step: 0,
  received: 0, // pictures, in all
  bytes: 0,
  dropped: 0,
  connections: 0,
  session: null,
  scene: null,
  held: { keys: [], axes: {} },
  kept: [], // the steps whose states are kept
};
const screen = $("screen").getContext("2d");
let sequence = 0; // of the last hold
const held = new Map(); // sequence -> when it was sent, of those whose picture has not come
const controlMs = [];
const shownAt = []; // when the pictures of the last second came
let decoding = false;
let next = null; // the picture that is to be shown once the one before it is decoded
let wantsToPlay = false;

const stream = new WorldStream({ onTold, onBreak, onEnd });
const input = new WorldInput($("pad"), (now) => {
  state.held = now;
  hold();
});

function hold() {
  if (state.connection !== "connected") return;
  sequence += 1;
  held.set(sequence, performance.now());
  stream.say("hold", { sequence, ...state.held });
}

function onTold(told, bytes) {
  switch (told.type) {
    case "attached":
      attached(told);
      break;
    case "frame":
      picture(told, bytes);
      break;
    case "playing":
      tellPlaying(true);
      break;
    case "paused":
      tellPlaying(false);
      if (told.error) {
        wantsToPlay = false;
        notify(told.error.message);
      }
      break;
    case "was_reset":
    case "was_restored":
      notify(null);
      $("sheet").replaceChildren();
      keep(told.kept ?? []);
      state.frame = 0;
      break;
    case "scene_changed":
      notify(null);
      break;
    case "checkpoint_kept":
      keep(told.kept);
      break;
    case "was_rewound":
      notify(null);
      $("sheet").replaceChildren();
      keep(state.kept.filter((step) => step <= told.committed_step));
      state.frame = 0;
      break;
    case "refused":
      notify(told.error.message);
      break;
    case "state_lost":
      wantsToPlay = false;
      tellPlaying(false);
      keep([]);
      notify("The state of this world is lost. Reset it to begin anew.");
      break;
    case "waits":
      tell(state.connection, told.what === "restored" || told.what === "parked" ? "Connected" : `The world is ${told.what} …`);
      break;
    case "let_go":
      notify(told.reason === "replaced" ? "Somebody else has taken this world over." : "The gateway let this page go.");
      break;
    case "error":
      notify(told.error.message);
      break;
  }
}

function keep(kept) {
  state.kept = kept;
  $("back").disabled = kept.length === 0;
}

function attached({ world, session, committed_step: committed, lost, kept = [] }) {
  keep(kept);
  state.session = session;
  state.step = committed;
  state.connections = stream.connections;
  tell("connected", "Connected");
  notify(lost ? "The state of this world is lost. Reset it to begin anew." : null);
  $("screen").width = world.width;
  $("screen").height = world.height;
  $("screen").style.aspectRatio = `${world.width} / ${world.height}`;
  input.use(world);
  if ($("scene").options.length !== world.scenes.length) {
    $("scene").replaceChildren(...world.scenes.map((name) => element("option", { text: name })));
  }
  for (const id of ["step", "reset", "keep", "fork", "end", "scene"]) $(id).disabled = false;
  // A new connection has nothing held down.
  sequence = 0;
  held.clear();
  hold();
  tellPlaying(false);
  if (wantsToPlay && !lost) stream.say("play");
}

function picture(told, bytes) {
  const now = performance.now();
  Object.assign(state, { frame: told.frame, step: told.step, dropped: told.dropped, scene: told.scene ?? null });
  state.received += 1;
  state.bytes += bytes.byteLength;
  shownAt.push(now);
  while (shownAt[0] < now - 1000) shownAt.shift();
  next = { told, bytes };
  if (!decoding) decode();
}

// Only the newest is shown, where pictures come faster than they are decoded.
async function decode() {
  decoding = true;
  while (next !== null) {
    const { told, bytes } = next;
    next = null;
    try {
      const bitmap = await createImageBitmap(new Blob([bytes], { type: `image/${told.format}` }));
      show(told, bitmap);
      bitmap.close();
    } catch (problem) {
      notify(`A picture could not be shown: ${problem.message}`);
    }
  }
  decoding = false;
}

function show(told, bitmap) {
  screen.drawImage(bitmap, 0, 0);
  const now = performance.now();
  for (const [number, at] of held) {
    if (number > told.action_sequence) continue;
    held.delete(number);
    // Those before it were never sampled: nobody waited for their pictures.
    if (number === told.action_sequence) controlMs.push(now - at);
    if (controlMs.length > MEASURED) controlMs.shift();
  }
  const entry = element("li", {}, copyOf(bitmap));
  entry.append(String(told.frame));
  $("sheet").append(entry);
  while ($("sheet").children.length > SHEET_FRAMES) $("sheet").firstChild.remove();
  if (told.scene && document.activeElement !== $("scene")) $("scene").value = told.scene;
  setText($("rate"), String(shownAt.length));
  setText($("control"), controlMs.length ? `${Math.round(median(controlMs))} ms` : "–");
  setText($("frame"), String(told.frame));
  setText($("steps"), String(told.denoising_steps));
  setText($("made"), `${Math.round(told.made_ms)} ms`);
  setText($("bytes"), size(state.bytes));
  setText($("dropped"), String(told.dropped));
}

function copyOf(bitmap) {
  const small = element("canvas", { width: bitmap.width, height: bitmap.height });
  small.getContext("2d").drawImage(bitmap, 0, 0);
  return small;
}

const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];

function onBreak(waitMs) {
  held.clear();
  tellPlaying(false);
  tell("disconnected", "Connection lost, coming back …");
  if (waitMs > 1000) notify("The gateway cannot be reached. The world waits for a while.");
}

function onEnd(reason) {
  wantsToPlay = false;
  tellPlaying(false);
  tell("ended", reason === "client" ? "The world has ended" : `The world has ended here: ${reason}`);
  for (const id of ["step", "reset", "keep", "back", "fork", "end", "scene"]) $(id).disabled = true;
}

function tell(connection, words) {
  state.connection = connection;
  document.body.dataset.state = connection === "ended" ? "disconnected" : connection;
  setText($("state"), words);
}

function tellPlaying(playing) {
  state.playing = playing;
  setText($("play"), playing ? "Pause" : "Play");
  $("play").setAttribute("aria-pressed", String(playing));
  $("step").disabled = playing || state.connection !== "connected";
}

function notify(words) {
  setText($("notice"), words ?? "");
  $("notice").hidden = !words;
}

// What is no seed is told by the browser, and nothing is done with it.
const seedFits = () => $("seed").reportValidity();
const seed = () => Number($("seed").value);

async function open() {
  tell("connecting", "Opening a world …");
  const asked = new URLSearchParams(location.search);
  const model = asked.get("model");
  const body = { ...(model ? { model } : {}), settings: { seed: seed() } };
  try {
    if (asked.has("fork")) await stream.fork(asked.get("fork"));
    else await stream.open(body);
    // Loaded again, or opened anew, this page makes no other fork.
    if (asked.has("fork")) history.replaceState(null, "", location.pathname);
    $("key-form").hidden = true;
  } catch (problem) {
    wantsToPlay = false;
    tell("idle", "No world yet");
    const words = problem instanceof Refusal ? problem.message : "The gateway does not answer.";
    notify(problem.status === 401 ? "This gateway needs a key." : words);
    $("key-form").hidden = problem.status !== 401;
    if (problem.status === 401) $("key").focus();
  }
}

function play() {
  if (state.connection === "connecting") return;
  if (stream.world === null && !seedFits()) return;
  wantsToPlay = !state.playing;
  if (stream.world === null) open();
  else stream.say(state.playing ? "pause" : "play");
  $("screen").focus({ preventScroll: true });
}

const reset = () => seedFits() && stream.say("reset", { settings: { seed: seed() } });

$("play").addEventListener("click", play);
$("step").addEventListener("click", () => stream.say("step"));
$("reset").addEventListener("click", reset);
$("keep").addEventListener("click", () => stream.say("checkpoint"));
$("back").addEventListener("click", () => stream.say("rewind", { step: state.kept.at(-1) }));
$("fork").addEventListener("click", () => window.open(`${location.pathname}?fork=${encodeURIComponent(stream.world.id)}`));
$("end").addEventListener("click", () => stream.say("close"));
$("scene").addEventListener("change", () => {
  stream.say("scene", { scene: $("scene").value });
  // A scene changes with a frame.
  if (!state.playing) stream.say("step");
  $("screen").focus({ preventScroll: true });
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  saveKey($("key").value.trim());
  $("key").value = "";
  wantsToPlay = true;
  open();
});
addEventListener("keydown", (event) => {
  if (event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, select, textarea")) return;
  if (event.code === "KeyP") play();
  if (event.code === "KeyR" && state.connection === "connected") reset();
});

window.antiphon = {
  get state() {
    return { ...state, framesPerSecond: shownAt.length, controlMs: [...controlMs] };
  },
  // The picture as [width, height, red, green, blue, alpha, ...].
  pixels() {
    const { width, height } = $("screen");
    return [width, height, ...screen.getImageData(0, 0, width, height).data];
  },
};

// A window that was opened for a fork has been given what its opener had, too.
if (new URLSearchParams(location.search).has("fork")) open();
else stream.comeBack();
