// What the page shows. Nothing here knows the protocol.

const $ = (id) => document.getElementById(id);

const METER_FLOOR_DB = -54;
const NEAR_END_PX = 60;

export const elements = {
  connect: $("connect"),
  talk: $("talk"),
  mute: $("mute"),
  interrupt: $("interrupt"),
  message: $("message"),
  messageForm: $("message-form"),
  keyForm: $("key-form"),
  key: $("key"),
  instructions: $("instructions"),
  shortcuts: $("shortcuts"),
};

// `announced` is what a screen reader is told. It changes less often than what is seen, so
// that it does not talk into the conversation.
export function showState(name, words, announced) {
  document.body.dataset.state = name;
  setText($("state"), words);
  setText($("announcement"), announced);
}

export function showNotice(words) {
  $("notice").textContent = words ?? "";
  $("notice").hidden = !words;
}

export function showKeyForm(shown) {
  const hadFocus = elements.keyForm.contains(document.activeElement);
  elements.keyForm.hidden = !shown;
  if (shown) elements.key.focus();
  else if (hadFocus) elements.talk.focus();
}

export function showControls({ connected, connecting, reconnect, microphone, muted, answering }) {
  setText(elements.connect, connected || connecting ? "Disconnect" : reconnect ? "Reconnect" : "Connect");
  elements.connect.classList.toggle("prominent", reconnect);
  setText(elements.talk.querySelector("span"), microphone ? "Stop talking" : "Talk");
  elements.talk.setAttribute("aria-pressed", String(microphone));
  // Not `disabled`: that would take the focus away from whoever has just pressed the button.
  elements.mute.setAttribute("aria-disabled", String(!microphone));
  elements.mute.setAttribute("aria-pressed", String(muted));
  setText(elements.mute, muted ? "Unmute" : "Mute");
  elements.interrupt.setAttribute("aria-disabled", String(!answering));
}

export function showDefaultInstructions(words) {
  elements.instructions.placeholder = words;
}

// One line of the transcript; returns the functions that change it.
export function addLine(who) {
  const scroll = $("scroll");
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
  // Whoever has scrolled up to read is left there.
  const changing = (change) => {
    const atEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR_END_PX;
    change();
    if (atEnd) scroll.scrollTop = scroll.scrollHeight;
  };
  changing(() => $("transcript").append(line));
  return {
    get text() {
      return text.textContent;
    },
    set(words, pending = false) {
      changing(() => {
        text.textContent = words;
        text.classList.toggle("pending", pending);
      });
    },
    add(words) {
      changing(() => {
        text.classList.remove("pending");
        text.textContent += words;
      });
    },
    mark(words) {
      changing(() => {
        mark.textContent = words;
      });
    },
    // While a line grows, a screen reader waits for the end of it.
    growing(grows) {
      if (grows) line.setAttribute("aria-busy", "true");
      else line.removeAttribute("aria-busy");
    },
  };
}

export function showLevels(input, output) {
  setLevel($("level-in"), input);
  setLevel($("level-out"), output);
}

function setLevel(bar, rms) {
  const decibels = 20 * Math.log10(Math.max(rms, 1e-5));
  const level = Math.max(0, Math.min(1, 1 - decibels / METER_FLOOR_DB));
  bar.style.setProperty("--level", level.toFixed(3));
}

let shownTurns = "";

export function showTurns(turns) {
  const now = JSON.stringify(turns);
  if (now === shownTurns) return;
  shownTurns = now;
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

// Leaves the node alone when nothing changed, so that nothing is announced twice.
function setText(element, words) {
  if (element.textContent !== words) element.textContent = words;
}
