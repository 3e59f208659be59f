// The console: a person talks with the pipeline of this gateway.

import { Microphone, Speaker, whyNoMicrophone } from "./audio.js";
import { EndOfSpeech, Turns } from "./latency.js";
import { Realtime, decode, saveKey, savedKey } from "./realtime.js";
import * as view from "./view.js";

const MODEL = new URLSearchParams(location.search).get("model") ?? "voice";
const SILENCE_AT_END_MS = 1200;
const HARMLESS = new Set(["response_cancel_not_active", "item_retrieve_invalid_item_id"]);

const state = {
  connection: "not connected", // connecting, connected, disconnected
  session: null,
  microphone: "off", // on, muted, unavailable
  userSpeaking: false,
  thinking: false,
  playing: false,
  response: null, // id of the response that is running
  dropped: null, // id of the response whose audio is no longer wanted
  interruptions: 0,
  lastTruncation: null, // {item_id, audio_end_ms}
  notice: null,
  complaint: null, // what the server said of the last thing it refused
  inputLevel: 0,
  wantsMicrophone: false,
  createWhenFree: false,
  unsent: null, // what was typed before there was a connection
};
const turns = new Turns();
const endOfSpeech = new EndOfSpeech();
const lines = new Map(); // item id -> line of the transcript
const parts = new Map(); // playback key -> {item_id, content_index, response_id}

const speaker = new Speaker({
  onHeard(key, at) {
    const part = parts.get(key);
    if (part) turns.mark(part.response_id, "heard", at);
    refresh();
  },
  onPlayed(key, samples, waiting) {
    state.playing = waiting > 0;
  },
  onEmpty() {
    state.playing = false;
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
    notify(words);
  },
});

const realtime = new Realtime({
  onEvent(event) {
    handlers[event.type]?.(event);
    refresh();
  },
  async onEnd({ words, needsKey }) {
    await hangUp();
    state.connection = "disconnected";
    view.showKeyForm(needsKey);
    // Before a session there was only one thing to be said: why there is none.
    notify(!needsKey && state.session === null && state.complaint ? state.complaint : words);
  },
});

const handlers = {
  "session.created"({ session }) {
    state.session = session.id;
    state.connection = "connected";
    realtime.send({
      type: "session.update",
      session: {
        type: "realtime",
        output_modalities: ["audio"],
        audio: {
          input: {
            transcription: { language: "en" },
            turn_detection: { type: "server_vad", create_response: true, interrupt_response: true },
          },
        },
      },
    });
    if (state.wantsMicrophone) startMicrophone();
    if (state.unsent !== null) sendText(state.unsent);
    state.unsent = null;
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
  },
  "response.output_audio_transcript.delta": text,
  "response.output_text.delta": text,
  "response.output_audio.delta"(event) {
    turns.mark(event.response_id, "ttfp", performance.now());
    if (event.response_id === state.dropped) return;
    state.thinking = false;
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
  },
  "response.done"({ response }) {
    const reason = response.status_details?.reason;
    turns.finish(response.id, { turn_detected: "interrupted", client_cancelled: "stopped" }[reason] ?? response.status);
    if (state.response === response.id) state.response = null;
    state.thinking = false;
    if (response.status === "failed") {
      const error = response.status_details?.error;
      notify(`The answer failed: ${error?.message ?? error?.code ?? "no reason was given"}`);
    }
    if (state.createWhenFree) {
      state.createWhenFree = false;
      realtime.send({ type: "response.create" });
    }
  },
  error({ error }) {
    state.complaint = error.message ?? error.code;
    if (!HARMLESS.has(error.code)) notify(`The server says: ${error.message ?? error.code}`);
  },
};

function text({ response_id, item_id, delta }) {
  if (!delta) return;
  turns.mark(response_id, "ttft", performance.now());
  line(item_id, "answer").add(delta);
}

function line(item, who) {
  if (!lines.has(item)) lines.set(item, view.addLine(who));
  return lines.get(item);
}

function notify(words) {
  state.notice = words;
  view.showNotice(words);
  refresh();
}

// The user has the floor: what is playing stops, and the server is told what was heard.
async function stopPlayback() {
  const running = state.response;
  const wasPlaying = state.playing;
  if (running !== null) state.dropped = running;
  state.playing = false;
  const { item: key, played, waiting } = await speaker.flush();
  const part = parts.get(key);
  parts.clear();
  if (!part || !(waiting || part.response_id === running)) return;
  const audio_end_ms = Math.floor(played / 24);
  state.interruptions += 1;
  state.lastTruncation = { item_id: part.item_id, audio_end_ms };
  if (wasPlaying) lines.get(part.item_id)?.mark(`interrupted after ${(audio_end_ms / 1000).toFixed(1)} s`);
  realtime.send({ type: "conversation.item.truncate", item_id: part.item_id, content_index: part.content_index, audio_end_ms });
  refresh();
}

async function interrupt() {
  if (state.response !== null) realtime.send({ type: "response.cancel", response_id: state.response });
  await stopPlayback();
}

async function connect() {
  notify(null);
  view.showKeyForm(false);
  if (lines.size > 0) {
    view.addLine("note").set("A new session: it does not know what was said before.");
  }
  lines.clear();
  parts.clear();
  Object.assign(state, { connection: "connecting", session: null, response: null, dropped: null, complaint: null });
  refresh();
  try {
    await speaker.start();
  } catch (problem) {
    notify(`This browser cannot play sound: ${problem.message}`);
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
  await speaker.flush();
  parts.clear();
}

async function startMicrophone() {
  state.wantsMicrophone = false;
  try {
    await microphone.start();
  } catch (problem) {
    microphone.stop();
    state.microphone = "unavailable";
    notify(problem.message);
    return;
  }
  if (state.connection !== "connected") {
    microphone.stop();
    return;
  }
  state.microphone = microphone.muted ? "muted" : "on";
  notify(null);
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
    notify(why);
    return;
  }
  if (state.connection === "connected") {
    await speaker.start();
    await startMicrophone();
  } else {
    state.wantsMicrophone = true;
    if (state.connection !== "connecting") await connect();
  }
}

async function toggleConnection() {
  if (state.connection === "connected" || state.connection === "connecting") {
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
    if (state.connection !== "connecting") await connect();
    return;
  }
  if (state.response !== null || state.playing) {
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

function inWords() {
  if (state.connection === "connecting") return ["connecting", "Connecting …"];
  if (state.connection === "disconnected") return ["disconnected", "Disconnected"];
  if (state.connection === "not connected") return ["idle", "Not connected"];
  if (state.userSpeaking) return ["hearing", "You are speaking"];
  if (state.playing) return ["answering", "Answering"];
  if (state.thinking) return ["thinking", "Thinking …"];
  if (state.microphone === "muted") return ["muted", "Connected, microphone muted"];
  if (state.microphone === "on") return ["listening", "Listening"];
  return ["connected", "Connected"];
}

function refresh() {
  view.showState(...inWords());
  view.showControls({
    connected: state.connection === "connected",
    connecting: state.connection === "connecting",
    reconnect: state.connection === "disconnected",
    microphone: microphone.on,
    muted: state.microphone === "muted",
    answering: state.response !== null || state.playing,
  });
  view.showTurns(turns.list);
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
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    interrupt();
    return;
  }
  if (event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, button, a, summary")) return;
  if (event.key === " ") {
    event.preventDefault();
    toggleTalk();
  } else if (event.key === "m") {
    toggleMute();
  }
});
window.addEventListener("pagehide", () => realtime.close());

window.antiphon = {
  // RMS (0..1) of the last 2048 samples at the page's output node.
  outputEnergy: () => speaker.energy(),
  get state() {
    const [name, words] = inWords();
    return { ...state, name, words, turns: turns.list.map((turn) => ({ ...turn })), key: savedKey() !== "" };
  },
};

const why = whyNoMicrophone();
if (why !== null) {
  state.microphone = "unavailable";
  notify(`${why} You can still type.`);
}
refresh();
meter();
