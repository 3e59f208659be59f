// Ask a gateway something over its own surface, and hear the answer whatever the network does.
//
//   node examples/native/ask.mjs "How are you?" http://127.0.0.1:8080 answer.pcm
//
// Runs in browsers (import `ask`) and in Node 22; Node 20 needs --experimental-websocket.
// A connection that breaks is made anew: the session goes on meanwhile, and what was missed
// is told again.

const TRIES = 8;
const FINAL = new Set([1000, 1008, 4001]); // coming back is of no use

// Resolves to {text, audio}: audio is an array of Uint8Array, PCM16 at 24 kHz.
export async function ask({ question, url, key = null, onAudio = () => {} }) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  const opened = await fetch(`${url}/v1/sessions`, {
    method: "POST",
    headers,
    body: JSON.stringify({ limits: { grace_s: 10 } }),
  });
  const session = await opened.json();
  if (!opened.ok) throw new Error(session.error.message);
  const answer = {
    session: session.id,
    secret: session.secret,
    cursor: null,
    text: "",
    audio: [],
    done: null,
  };
  try {
    for (let attempt = 0; attempt < TRIES; attempt++) {
      await listen(url, key, answer, question, onAudio);
      if (answer.done) return answer;
      await new Promise((resume) => setTimeout(resume, 100 * 2 ** attempt));
    }
    throw new Error("the connection keeps breaking");
  } finally {
    await fetch(`${url}/v1/sessions/${session.id}`, { method: "DELETE", headers });
  }
}

// Resolves when the answer is complete or the connection broke; rejects when it is refused.
function listen(url, key, answer, question, onAudio) {
  // Browsers cannot send headers with a WebSocket: the key goes as a sub-protocol.
  const protocols = ["antiphon.json"];
  if (key) protocols.push(`openai-insecure-api-key.${key}`);
  const address = `${url.replace(/^http/, "ws")}/v1/sessions/${answer.session}/stream`;
  const socket = new WebSocket(address, protocols);
  return new Promise((resolve, reject) => {
    socket.onopen = () => {
      const attach = { type: "attach", role: "controller", secret: answer.secret };
      if (answer.cursor) attach.cursor = answer.cursor;
      const item = { role: "user", parts: [{ kind: "input_text", text: question }] };
      socket.send(JSON.stringify(attach));
      // An id that comes again is answered again, and not carried out again.
      socket.send(
        JSON.stringify({ type: "update", id: "question", input: { type: "item", item } }),
      );
      socket.send(JSON.stringify({ type: "signal", id: "respond", signal: { type: "respond" } }));
    };
    socket.onmessage = (event) => {
      const frame = JSON.parse(event.data);
      if (frame.cursor) answer.cursor = frame.cursor;
      switch (frame.type) {
        case "attached": // the old secret is good until something is said under the new one
          answer.secret = frame.secret;
          break;
        case "text_delta":
          answer.text += frame.delta;
          break;
        case "audio_delta": {
          const pcm = Uint8Array.from(atob(frame.pcm), (letter) => letter.charCodeAt(0));
          answer.audio.push(pcm);
          onAudio(pcm);
          break;
        }
        case "response_done":
          answer.done = frame.response;
          socket.close();
          break;
        case "answer":
        case "refused":
        case "error":
          if (frame.error) reject(new Error(frame.error.message));
          break;
      }
    };
    socket.onerror = () => {}; // a close event follows
    socket.onclose = (event) => {
      if (!answer.done && FINAL.has(event.code)) reject(new Error(`closed: ${event.reason}`));
      else resolve();
    };
  });
}

if (globalThis.process?.argv[1]?.endsWith("ask.mjs")) {
  const port = process.env.ANTIPHON_PORT ?? 8080;
  const [question, url = `http://127.0.0.1:${port}`, out] = process.argv.slice(2);
  const key = process.env.ANTIPHON_KEY ?? null;
  const answer = await ask({ question, url, key });
  console.log(answer.text);
  if (out) {
    const { writeFile } = await import("node:fs/promises");
    await writeFile(out, Buffer.concat(answer.audio));
  }
}
