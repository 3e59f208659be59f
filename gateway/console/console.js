// The console: a person talks with the pipeline of this gateway.

import { Microphone, Speaker, whyNoMicrophone } from "./audio.js";
import { EndOfSpeech, Turns } from "./latency.js";
import { Realtime, decode, saveKey, savedKey } from "./realtime.js";
import { listenForKeys } from "./shortcuts.js";
import { state } from "./state.js";
import * as view from "./view.js";
import { inWords } from "./words.js";

const MODEL = new URLSearchParams(location.search).get("model") ?? "voice";
const SILENCE_AT_END_MS = 1200;
const HARMLESS = new Set(["response_cancel_not_active", "item_retrieve_invalid_item_id"]);
const TYPING_WORKS = "You can type, and read the answers.";

const turns = new Turns();
const endOfSpeech = new EndOfSpeech();
const lines = new Map(); // item id -> line of the transcript
const spoken = new Set(); // responses whose sound has come and is still being played
const parts = new Map(); // playback key -> {item_id, content_index, response_id}

const speaker = new Speaker({
  onHeard(key, at) {
    const part = parts.get(key);
    if (part) turns.heard(part.response_id, at);
    settle("sound");
    refresh();
  },
  onPlayed(key, samples, waiting) {
    state.playing = waiting > 0;
  },
  onEmpty() {
    state.playing = false;
    for (const response of spoken) sayIfUnheard(response);
    refresh();
  },
});

const microphone = new Microphone({
  onPiece(pcm, level) {
    const heard = microphone.muted ? 0 : level;
    state.inputLevel = heard;
    endOfSpeech.hear(heard, performance.now());
    realtime.append(pcm);
  },
  onEnd(words) {
    state.microphone = "off";
    state.inputLevel = 0;
    notify(words, "microphone");
  },
});

const realtime = new Realtime({
  onEvent(event) {
    handlers[event.type]?.(event);
    refresh();
  },
  onBreak() {
    state.connection = "reconnecting";
    notify("The connection was lost; taking the conversation up again …", "connection");
  },
  async onEnd({ words, needsKey }) {
    await hangUp();
    state.connection = "disconnected";
    view.showKeyForm(needsKey);
    // Before a session there was only one thing to be said: why there is none.
    if (!needsKey && state.session === null && state.complaint) {
      notify(`There is no session: ${state.complaint}.`, "connection");
    } else if (state.session !== null) {
      notify(`${words} Reconnect for a new session; it will not know this conversation.`, "connection");
    } else {
      notify(words, "connection");
    }
  },
});

const handlers = {
  "session.created"({ session, antiphon }) {
    state.session = session.id;
    state.connection = "connected";
    if (antiphon?.resumed) {
      settle("connection");
      if (antiphon.lost) notify("The connection was lost for so long that a part is missing.", "connection");
      askWhatWaited();
      return;
    }
    if (state.forgets) view.addLine("note").set("A new session: it does not know what was said before.");
    state.forgets = false;
    state.defaultInstructions = session.instructions ?? "";
    view.showDefaultInstructions(state.defaultInstructions);
    realtime.configure(wantedInstructions());
    askWhatWaited();
  },
  "input_audio_buffer.speech_started"({ item_id }) {
    state.userSpeaking = true;
    line(item_id, "user").set("…", true);
    stopPlayback();
  },
  "input_audio_buffer.speech_stopped"() {
    state.userSpeaking = false;
    state.thinking = true;
    turns.endOfTurn(endOfSpeech.at);
  },
  "conversation.item.added"({ item }) {
    if (item.role !== "user") return;
    const text = (item.content ?? []).map((part) => part.text ?? part.transcript ?? "").join(" ");
    if (text) line(item.id, "user").set(text);
    else line(item.id, "user");
  },
  "conversation.item.input_audio_transcription.delta"({ item_id, delta }) {
    const own = line(item_id, "user");
    own.set((own.text === "…" ? "" : own.text) + delta);
  },
  "conversation.item.input_audio_transcription.completed"({ item_id, transcript }) {
    line(item_id, "user").set(transcript.trim() || "(nothing understood)", !transcript.trim());
    if (!transcript.trim()) state.thinking = false;
  },
  "conversation.item.input_audio_transcription.failed"({ item_id, error }) {
    line(item_id, "user").mark(`no transcript: ${error?.message ?? "it failed"}`);
  },
  "response.created"({ response }) {
    state.response = response.id;
    state.thinking = true;
    turns.begin(response.id);
    settle("answer", "sound", "server");
  },
  "response.output_audio_transcript.delta": text,
  "response.output_text.delta": text,
  "response.output_audio.delta"(event) {
    turns.mark(event.response_id, "ttfp", performance.now());
    if (event.response_id === state.dropped) return;
    state.thinking = false;
    if (!speaker.ready) return;
    state.playing = true;
    const key = `${event.item_id} ${event.content_index}`;
    const { item_id, content_index, response_id } = event;
    parts.set(key, { item_id, content_index, response_id });
    speaker.play(key, decode(event.delta));
  },
  "conversation.item.truncated"({ item_id }) {
    realtime.send({ type: "conversation.item.retrieve", item_id });
  },
  "conversation.item.retrieved"({ item }) {
    const heard = (item.content ?? []).map((part) => part.transcript ?? part.text ?? "").join("");
    lines.get(item.id)?.set(heard.trim() || "(nothing of it was heard)", !heard.trim());
    lines.get(item.id)?.growing(false);
  },
  "response.done"({ response }) {
    const ended = { turn_detected: "interrupted", client_cancelled: "stopped" };
    turns.finish(response.id, ended[response.status_details?.reason] ?? response.status);
    if (state.response === response.id) state.response = null;
    state.thinking = false;
    const said = (response.output ?? []).map((item) => lines.get(item.id)).filter(Boolean);
    for (const own of said) own.growing(false);
    if (response.status === "failed") {
      const error = response.status_details?.error;
      const reason = error?.message ?? error?.code ?? "no reason was given";
      notify(`The answer failed: ${reason}. You can ask again.`, "answer");
      for (const own of said) own.mark("failed");
    } else if (response.status === "incomplete") {
      for (const own of said) own.mark("cut off: it grew too long");
    } else if (response.status === "completed" && speaker.ready) {
      spoken.add(response.id);
      if (!state.playing) sayIfUnheard(response.id);
    }
    if (state.createWhenFree) {
      state.createWhenFree = false;
      realtime.send({ type: "response.create" });
    }
  },
  error({ error }) {
    state.complaint = (error.message ?? error.code).replace(/\.$/, "");
    if (!HARMLESS.has(error.code)) notify(`The server says: ${state.complaint}.`, "server");
  },
};

// What the person wanted while there was no connection.
function askWhatWaited() {
  if (state.wantsMicrophone) startMicrophone();
  if (state.unsent !== null) sendText(state.unsent);
  state.unsent = null;
}

function text({ response_id, item_id, delta }) {
  if (!delta) return;
  turns.mark(response_id, "ttft", performance.now());
  if (response_id === state.dropped) return;
  const own = line(item_id, "answer");
  own.growing(true);
  own.add(delta);
}

// Completed, all of it played, and nobody can have heard a thing.
function sayIfUnheard(response) {
  spoken.delete(response);
  if (turns.of(response)?.audible === false) notify("The answer made no sound.", "sound");
}

function line(item, who) {
  if (!lines.has(item)) lines.set(item, view.addLine(who));
  return lines.get(item);
}

function notify(words, about = null) {
  state.notice = words;
  state.noticeAbout = about;
  view.showNotice(words);
  refresh();
}

// What was said about this is no longer so.
function settle(...about) {
  if (about.includes(state.noticeAbout)) notify(null);
}

function wantedInstructions() {
  return view.elements.instructions.value.trim() || state.defaultInstructions;
}

// The user has the floor: what is playing stops, and the server is told what was heard.
async function stopPlayback() {
  const running = state.response;
  const wasPlaying = state.playing;
  if (running !== null) state.dropped = running;
  state.playing = false;
  const stopped = new Map(parts);
  parts.clear();
  spoken.clear();
  const { item: key, played, waiting } = await silence();
  const part = stopped.get(key);
  if (!part || !(waiting || part.response_id === running)) return;
  const audio_end_ms = Math.floor(played / 24);
  state.interruptions += 1;
  state.lastTruncation = { item_id: part.item_id, audio_end_ms };
  if (wasPlaying) lines.get(part.item_id)?.mark(`interrupted after ${(audio_end_ms / 1000).toFixed(1)} s`);
  realtime.send({ type: "conversation.item.truncate", item_id: part.item_id, content_index: part.content_index, audio_end_ms });
  refresh();
}

async function interrupt() {
  if (!answering()) return;
  if (state.response !== null) realtime.send({ type: "response.cancel", response_id: state.response });
  await stopPlayback();
}

async function connect() {
  notify(null);
  view.showKeyForm(false);
  state.forgets ||= lines.size > 0;
  lines.clear();
  parts.clear();
  spoken.clear();
  Object.assign(state, { connection: "connecting", session: null, response: null, dropped: null, complaint: null });
  refresh();
  try {
    await speaker.start();
  } catch (problem) {
    notify(`${problem.message} ${TYPING_WORKS}`, "connection");
  }
  // The person may have hung up while the browser got its sound ready.
  if (state.connection === "connecting") realtime.connect(MODEL);
}

async function hangUp() {
  state.wantsMicrophone = false;
  microphone.stop();
  realtime.close();
  Object.assign(state, {
    microphone: "off",
    userSpeaking: false,
    thinking: false,
    playing: false,
    response: null,
    createWhenFree: false,
    inputLevel: 0,
  });
  await silence();
  parts.clear();
}

// A report from before the stop may still have come in between; none comes after it.
async function silence() {
  const stopped = await speaker.flush();
  state.playing = false;
  refresh();
  return stopped;
}

async function startMicrophone() {
  state.wantsMicrophone = false;
  if (microphone.starting) return;
  state.microphone = "asking";
  refresh();
  try {
    await microphone.start();
  } catch (problem) {
    state.microphone = "unavailable";
    notify(`${problem.message} ${TYPING_WORKS}`, "microphone");
    return;
  }
  if (state.connection !== "connected") {
    microphone.stop();
    state.microphone = "off";
  } else {
    state.microphone = microphone.muted ? "muted" : "on";
    settle("microphone");
  }
  refresh();
}

function stopMicrophone() {
  microphone.stop();
  state.microphone = "off";
  state.inputLevel = 0;
  // Silence lets the server find the end of what was being said.
  realtime.append(new ArrayBuffer(SILENCE_AT_END_MS * 48));
  refresh();
}

async function toggleTalk() {
  if (microphone.on) {
    stopMicrophone();
    return;
  }
  const why = whyNoMicrophone();
  if (why !== null) {
    state.microphone = "unavailable";
    notify(`${why} ${TYPING_WORKS}`, "microphone");
    return;
  }
  if (state.connection === "connected") {
    await speaker.start();
    await startMicrophone();
  } else {
    state.wantsMicrophone = true;
    if (!onTheWay()) await connect();
  }
}

async function toggleConnection() {
  if (state.connection === "connected" || onTheWay()) {
    await hangUp();
    state.connection = "not connected";
    refresh();
  } else {
    await connect();
  }
}

function toggleMute() {
  if (!microphone.on) return;
  microphone.mute(!microphone.muted);
  state.microphone = microphone.muted ? "muted" : "on";
  refresh();
}

async function sendText(words) {
  if (state.connection !== "connected") {
    state.unsent = words;
    if (!onTheWay()) await connect();
    return;
  }
  if (answering()) {
    state.createWhenFree = state.response !== null;
    await interrupt();
  }
  realtime.send({
    type: "conversation.item.create",
    item: { type: "message", role: "user", content: [{ type: "input_text", text: words }] },
  });
  turns.endOfTurn(performance.now());
  if (!state.createWhenFree) realtime.send({ type: "response.create" });
}

function refresh() {
  view.showState(...inWords(state));
  view.showControls({
    connected: state.connection === "connected",
    connecting: onTheWay(),
    reconnect: state.connection === "disconnected",
    microphone: microphone.on,
    muted: state.microphone === "muted",
    answering: answering(),
  });
  view.showTurns(turns.list);
}

function onTheWay() {
  return state.connection === "connecting" || state.connection === "reconnecting";
}

function answering() {
  return state.response !== null || state.playing;
}

function meter() {
  view.showLevels(state.inputLevel, speaker.energy());
  requestAnimationFrame(meter);
}

view.elements.connect.addEventListener("click", toggleConnection);
view.elements.talk.addEventListener("click", toggleTalk);
view.elements.mute.addEventListener("click", toggleMute);
view.elements.interrupt.addEventListener("click", interrupt);
view.elements.messageForm.addEventListener("submit", (event) => {
  event.preventDefault();
  const words = view.elements.message.value.trim();
  if (!words) return;
  view.elements.message.value = "";
  sendText(words);
});
view.elements.keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  saveKey(view.elements.key.value.trim());
  view.elements.key.value = "";
  connect();
});
view.elements.instructions.addEventListener("change", () => {
  realtime.instruct(wantedInstructions());
});
listenForKeys(() => view.elements.shortcuts.checked, { talk: toggleTalk, mute: toggleMute, interrupt });
window.addEventListener("pagehide", () => realtime.close());

window.antiphon = {
  // RMS (0..1) of the last 2048 samples at the page's output node.
  outputEnergy: () => speaker.energy(),
  get state() {
    const [name, words] = inWords(state);
    return { ...state, name, words, turns: turns.list.map((turn) => ({ ...turn })), key: savedKey() !== "" };
  },
};

const why = whyNoMicrophone();
if (why !== null) {
  state.microphone = "unavailable";
  notify(`${why} ${TYPING_WORKS}`, "microphone");
}
refresh();
meter();
