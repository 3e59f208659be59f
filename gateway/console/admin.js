// The operator's endpoints: requests, and the live overview that comes back by itself.

const KEY_IN_SESSION = "antiphon.admin-key";
// How long to wait before each attempt to look again; the last of them repeats.
const COME_BACK_MS = [500, 1000, 2000, 4000, 8000];
// A document is due every few seconds. Without one the connection is as good as gone.
const SILENCE_MS = 10_000;

export function saveKey(key) {
  if (key) sessionStorage.setItem(KEY_IN_SESSION, key);
  else sessionStorage.removeItem(KEY_IN_SESSION);
}

export function hasKey() {
  return sessionStorage.getItem(KEY_IN_SESSION) !== null;
}

// A request that the gateway has refused.
export class Refusal extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// The answer to a request. Throws a Refusal, or a TypeError where no gateway answers.
export async function ask(method, path) {
  const answer = await request(method, path);
  return answer.json();
}

async function request(method, path, signal) {
  const key = sessionStorage.getItem(KEY_IN_SESSION);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const answer = await fetch(`/v1/admin/${path}`, { method, headers, signal, cache: "no-store" });
  if (answer.ok) return answer;
  const error = await answer.json().then((body) => body.error, () => null);
  throw new Refusal(answer.status, error?.code ?? "", error?.message ?? `status ${answer.status}`);
}

export class Live {
  // onDocument(document), onRefused(refusal) when it is of no use to try again without a key,
  // onBreak(words, waitMs) when it is tried again after that time.
  constructor({ onDocument, onRefused, onBreak }) {
    this.onDocument = onDocument;
    this.onRefused = onRefused;
    this.onBreak = onBreak;
    this.looking = null; // the AbortController of the stream that is read
    this.timer = null;
    this.attempts = 0;
  }

  start() {
    this.stop();
    this.looking = new AbortController();
    this.#look(this.looking);
  }

  stop() {
    clearTimeout(this.timer);
    this.looking?.abort();
    this.looking = null;
  }

  async #look(looking) {
    let words = "The connection was lost";
    try {
      await this.#read(looking);
    } catch (problem) {
      if (looking !== this.looking) return;
      if (problem instanceof Refusal) {
        if (problem.status === 401) {
          this.stop();
          this.onRefused(problem);
          return;
        }
        words = problem.message.replace(/\.$/, "");
      }
    }
    if (looking !== this.looking) return;
    const waitMs = COME_BACK_MS[Math.min(this.attempts, COME_BACK_MS.length - 1)];
    this.attempts += 1;
    this.timer = setTimeout(() => this.start(), waitMs);
    this.onBreak(words, waitMs);
  }

  async #read(looking) {
    let silence = setTimeout(() => looking.abort(), SILENCE_MS);
    try {
      const answer = await request("GET", "live", looking.signal);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        clearTimeout(silence);
        silence = setTimeout(() => looking.abort(), SILENCE_MS);
        const events = (text + value).split("\n\n");
        text = events.pop();
        for (const event of events) this.#receive(looking, event);
      }
    } finally {
      clearTimeout(silence);
    }
  }

  #receive(looking, event) {
    if (looking !== this.looking || !event.startsWith("data: ")) return;
    this.attempts = 0;
    this.onDocument(JSON.parse(event.slice("data: ".length)));
  }
}
