// What the page shows. Nothing here knows the protocol.

const $ = (id) => document.getElementById(id);

const METER_FLOOR_DB = -54;

export const elements = {
  connect: $("connect"),
  talk: $("talk"),
  mute: $("mute"),
  interrupt: $("interrupt"),
  message: $("message"),
  messageForm: $("message-form"),
  keyForm: $("key-form"),
  key: $("key"),
};

export function showState(name, words) {
  document.body.dataset.state = name;
  $("state").textContent = words;
}

export function showNotice(words) {
  $("notice").textContent = words ?? "";
  $("notice").hidden = !words;
}

export function showKeyForm(shown) {
  elements.keyForm.hidden = !shown;
  if (shown) elements.key.focus();
}

export function showControls({ connected, connecting, reconnect, microphone, muted, answering }) {
  elements.connect.textContent = connected || connecting ? "Disconnect" : reconnect ? "Reconnect" : "Connect";
  elements.connect.classList.toggle("prominent", reconnect);
  elements.talk.textContent = microphone ? "Stop talking" : "Talk";
  elements.talk.setAttribute("aria-pressed", String(microphone));
  elements.mute.disabled = !microphone;
  elements.mute.setAttribute("aria-pressed", String(muted));
  elements.mute.textContent = muted ? "Unmute" : "Mute";
  elements.interrupt.disabled = !answering;
}

// One line of the transcript; returns the functions that change it.
export function addLine(who) {
  const log = $("transcript");
  $("empty").hidden = true;
  const line = document.createElement("li");
  line.className = who;
  const name = document.createElement("span");
  name.className = "who";
  name.textContent = { user: "You", answer: "Antiphon", note: "" }[who];
  const text = document.createElement("p");
  const mark = document.createElement("span");
  mark.className = "mark";
  line.append(name, text, mark);
  if (who === "note") name.remove();
  log.append(line);
  const follow = () => line.scrollIntoView({ block: "nearest" });
  follow();
  return {
    get text() {
      return text.textContent;
    },
    set(words, pending = false) {
      text.textContent = words;
      text.classList.toggle("pending", pending);
      follow();
    },
    add(words) {
      text.classList.remove("pending");
      text.textContent += words;
      follow();
    },
    mark(words) {
      mark.textContent = words;
      follow();
    },
    remove() {
      line.remove();
    },
  };
}

export function clearTranscript() {
  $("transcript").replaceChildren();
}

export function showLevels(input, output) {
  setMeter($("level-in"), input);
  setMeter($("level-out"), output);
}

function setMeter(meter, rms) {
  const decibels = 20 * Math.log10(Math.max(rms, 1e-5));
  meter.value = Math.max(0, Math.min(1, 1 - decibels / METER_FLOOR_DB));
}

export function showTurns(turns) {
  $("no-turns").hidden = turns.length > 0;
  $("turns").hidden = turns.length === 0;
  const rows = [...turns].reverse().map((turn) => {
    const row = document.createElement("tr");
    const cells = [turn.number, turn.ttft, turn.ttfp, turn.heard, turn.status];
    cells.forEach((value, index) => {
      const cell = document.createElement(index === 0 ? "th" : "td");
      if (index === 0) cell.scope = "row";
      cell.textContent = value ?? "–";
      row.append(cell);
    });
    return row;
  });
  $("turn-rows").replaceChildren(...rows);
}
