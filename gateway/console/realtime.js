// The connection to the Realtime endpoint: events in and out, and the end in words.

const KEY_IN_SESSION = "antiphon.key";
const KEY_PROTOCOL = "openai-insecure-api-key.";
const RESUME_PROTOCOL = "antiphon-resume.";
// How long to wait before each attempt to take up a session whose connection was lost.
const COME_BACK_MS = [0, 250, 500, 1000, 1000, 2000, 2000, 4000, 4000];
const CONNECTION_LOST = new Set([1006, 1011]);

export function savedKey() {
  return sessionStorage.getItem(KEY_IN_SESSION) ?? "";
}

export function saveKey(key) {
  if (key) sessionStorage.setItem(KEY_IN_SESSION, key);
  else sessionStorage.removeItem(KEY_IN_SESSION);
}

export class Realtime {
  // onEvent(event), onBreak(), onEnd({words, needsKey}). `onBreak` is called when the connection
  // was lost and the session is to be taken up again; `onEnd` once for each session that did
  // not end by close().
  constructor({ onEvent, onBreak, onEnd }) {
    this.onEvent = onEvent;
    this.onBreak = onBreak;
    this.onEnd = onEnd;
    this.socket = null;
    this.back = null; // {session, secret, sequence}: with what to come back
    this.attempts = 0;
    this.timer = null;
  }

  get open() {
    return this.socket !== null && this.socket.readyState === WebSocket.OPEN;
  }

  connect(model) {
    this.back = null;
    this.#connect(`model=${encodeURIComponent(model)}&resume=1`, []);
  }

  #connect(query, extra) {
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    const protocols = ["realtime", ...extra];
    const key = savedKey();
    if (key) protocols.push(KEY_PROTOCOL + key);
    let socket;
    try {
      socket = new WebSocket(`${scheme}://${location.host}/v1/realtime?${query}`, protocols);
    } catch {
      // A key with characters that no sub-protocol may have.
      this.onEnd({ words: "This key cannot be sent by a browser.", needsKey: true });
      return;
    }
    this.socket = socket;
    let opened = false;
    socket.onopen = () => {
      opened = true;
    };
    socket.onmessage = ({ data }) => {
      if (socket === this.socket) this.#receive(JSON.parse(data));
    };
    socket.onclose = async ({ code, reason }) => {
      if (socket !== this.socket) return;
      this.socket = null;
      if (this.back !== null && CONNECTION_LOST.has(code) && this.attempts < COME_BACK_MS.length) {
        this.onBreak();
        this.timer = setTimeout(() => this.#comeBack(), COME_BACK_MS[this.attempts]);
        this.attempts += 1;
        return;
      }
      this.back = null;
      this.onEnd(opened ? ended(code, reason) : await refused(key));
    };
  }

  #comeBack() {
    const { session, secret, sequence } = this.back;
    const query = `session=${encodeURIComponent(session)}&cursor=${sequence}`;
    this.#connect(query, [RESUME_PROTOCOL + secret]);
  }

  #receive(event) {
    if (event.antiphon?.secret) {
      this.back = { session: event.session.id, secret: event.antiphon.secret, sequence: this.back?.sequence ?? 0 };
      this.attempts = 0;
    }
    if (event.sequence !== undefined && this.back !== null) this.back.sequence = event.sequence;
    this.onEvent(event);
  }

  send(event) {
    if (this.open) this.socket.send(JSON.stringify(event));
  }

  // What this page wants of a session.
  configure(instructions) {
    const turn_detection = { type: "server_vad", create_response: true, interrupt_response: true };
    const input = { transcription: { language: "en" }, turn_detection };
    this.#update({ output_modalities: ["audio"], instructions, audio: { input } });
  }

  instruct(instructions) {
    this.#update({ instructions });
  }

  #update(settings) {
    this.send({ type: "session.update", session: { type: "realtime", ...settings } });
  }

  append(pcm) {
    this.send({ type: "input_audio_buffer.append", audio: encode(pcm) });
  }

  close() {
    const socket = this.socket;
    this.socket = null;
    this.back = null;
    clearTimeout(this.timer);
    socket?.close(1000);
  }
}

function ended(code, reason) {
  if (reason === "missing_api_key") return { words: "This gateway needs a key.", needsKey: true };
  if (reason === "invalid_api_key") return { words: "This key is not accepted.", needsKey: true };
  if (code === 4001) return { words: "Another page has taken this session over.", needsKey: false };
  if (reason === "session_not_found" || reason === "resume_refused" || reason === "secret_reused") {
    return { words: "The connection was lost, and the session is over.", needsKey: false };
  }
  const said = reason ? `: ${reason.replaceAll("_", " ")}` : "";
  const words = {
    1000: "The server ended the session",
    1001: "The server is going away",
    1006: "The connection was lost",
    1008: "The server refused access",
    1009: "A message was too big",
    1011: "The server had a fault",
    1012: "The server is restarting",
    1013: "The server is full; try again later",
  }[code];
  return { words: `${words ?? `The connection ended (${code})`}${said}.`, needsKey: code === 1008 && !reason };
}

// A browser does not say why a WebSocket was refused, so ask in another way.
async function refused(key) {
  let models;
  try {
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    models = await fetch("/v1/models", { cache: "no-store", headers });
  } catch {
    return { words: "The server does not answer.", needsKey: false };
  }
  if (models.status === 401) {
    return { words: key ? "This key is not accepted." : "This gateway needs a key.", needsKey: true };
  }
  return { words: "The server refused the connection. It may be starting; try again.", needsKey: false };
}

function encode(buffer) {
  return btoa(String.fromCharCode(...new Uint8Array(buffer)));
}

export function decode(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0)).buffer;
}
