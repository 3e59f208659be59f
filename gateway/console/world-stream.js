// The connection to a world: it comes back by itself, and goes on in the same one.

const KEY_IN_SESSION = "antiphon.key";
const WORLD_IN_SESSION = "antiphon.world";
const COME_BACK_MS = [200, 500, 1000, 2000, 4000];
// What ends a world, or this page's part in it. Others are tried again.
const FINAL = new Set([1000, 1008, 4001]);
const PING_MS = 1000;
// Without a word for so long the connection is as good as gone.
const SILENCE_MS = 3000;
// How far the world may be ahead of what was seen: it stands still soon after the network does.
const WINDOW_FRAMES = 16;

export const saveKey = (key) => sessionStorage.setItem(KEY_IN_SESSION, key);

// A request that the gateway has refused.
export class Refusal extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function ask(method, path, body) {
  const key = sessionStorage.getItem(KEY_IN_SESSION);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (body) headers["content-type"] = "application/json";
  const answer = await fetch(path, { method, headers, body: body && JSON.stringify(body), cache: "no-store" });
  if (answer.ok) return answer.status === 204 ? null : answer.json();
  const error = await answer.json().then((told) => told.error, () => null);
  throw new Refusal(answer.status, error?.code ?? "", error?.message ?? `status ${answer.status}`);
}

export class WorldStream {
  // onTold(frame, bytes) gets all that the world says, `bytes` with a picture; onBreak(waitMs)
  // that the connection is lost, and taken up again after that time; onEnd(words) that it is over.
  constructor({ onTold, onBreak, onEnd }) {
    this.onTold = onTold;
    this.onBreak = onBreak;
    this.onEnd = onEnd;
    this.world = null; // {id, stream, secret}
    this.socket = null;
    this.attempts = 0;
    this.connections = 0;
    this.timers = [];
  }

  // Throws a Refusal, or a TypeError where no gateway answers.
  async open(body) {
    this.#keep(await ask("POST", "/v1/worlds", body));
    this.#connect();
  }

  // Begins as another world is now. Throws as `open` does.
  async fork(id) {
    this.#keep(await ask("POST", `/v1/worlds/${encodeURIComponent(id)}/fork`, {}));
    this.#connect();
  }

  // Goes on in the world that this tab had before it was loaded again; whether there is one.
  async comeBack() {
    const kept = JSON.parse(sessionStorage.getItem(WORLD_IN_SESSION) ?? "null");
    if (kept === null) return false;
    try {
      await ask("GET", `/v1/worlds/${encodeURIComponent(kept.id)}`);
    } catch (problem) {
      if (problem instanceof Refusal && problem.status !== 401) this.#keep(null);
      return false;
    }
    this.#keep(kept);
    this.#connect();
    return true;
  }

  say(type, fields = {}) {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify({ type, ...fields }));
  }

  #keep(world) {
    this.world = world && { id: world.id, stream: world.stream, secret: world.secret };
    if (world) sessionStorage.setItem(WORLD_IN_SESSION, JSON.stringify(this.world));
    else sessionStorage.removeItem(WORLD_IN_SESSION);
  }

  #connect() {
    const key = sessionStorage.getItem(KEY_IN_SESSION);
    const protocols = ["antiphon.json"];
    if (key) protocols.push(`openai-insecure-api-key.${key}`);
    const socket = new WebSocket(`${location.origin.replace(/^http/, "ws")}${this.world.stream}`, protocols);
    socket.binaryType = "arraybuffer";
    this.socket = socket;
    let header = null; // of the picture that comes next
    const alive = () => {
      clearTimeout(this.timers[0]);
      this.timers[0] = setTimeout(() => this.#lost(socket, 1006, ""), SILENCE_MS);
    };
    alive();
    socket.onopen = () => {
      this.say("attach", { role: "controller", secret: this.world.secret, format: "jpeg", quality: 90, window: WINDOW_FRAMES });
      this.timers[1] = setInterval(() => this.say("ping"), PING_MS);
    };
    socket.onmessage = ({ data }) => {
      if (socket !== this.socket) return;
      alive();
      if (typeof data !== "string") {
        this.say("seen", { frame: header.frame });
        this.onTold(header, data);
        return;
      }
      const frame = JSON.parse(data);
      if (frame.type === "attached") {
        this.attempts = 0;
        this.connections += 1;
        this.#keep({ ...this.world, secret: frame.secret });
      }
      if (frame.type === "frame") header = frame;
      else this.onTold(frame, null);
    };
    socket.onclose = ({ code, reason }) => this.#lost(socket, code, reason);
  }

  #lost(socket, code, reason) {
    if (socket !== this.socket) return;
    clearTimeout(this.timers[0]);
    clearInterval(this.timers[1]);
    this.socket = null;
    socket.close();
    if (FINAL.has(code)) {
      this.#keep(null);
      this.onEnd(reason || "client");
      return;
    }
    const waitMs = COME_BACK_MS[Math.min(this.attempts, COME_BACK_MS.length - 1)];
    this.attempts += 1;
    this.onBreak(waitMs);
    setTimeout(() => this.#connect(), waitMs);
  }
}
