// The robots' page: how each of them is answered, and the button that makes it stand still.

import { Live, Refusal, ask, hasKey, saveKey } from "./admin.js";
import { setText } from "./dom.js";
import { RobotsView } from "./robots-view.js";

const $ = (id) => document.getElementById(id);

const state = {
  connection: "connecting", // connected, disconnected, refused, away
  documents: 0,
};

const view = new RobotsView({ onStop: stop, onLook: look });

const live = new Live({
  onDocument(overview) {
    state.documents += 1;
    tell("connected", overview.draining ? "The gateway is draining" : "Live");
    notify(null);
    askForKey(false);
    const held = Object.keys(overview.pipelines).filter((name) => overview.pipelines[name].stopped);
    setText($("held"), `All robots of ${held.join(", ")} stand still, those that come later too.`);
    $("held").hidden = held.length === 0;
    view.show(overview.sessions.filter(({ kind }) => kind === "robot"));
    const unseen = overview.sessions_total - overview.sessions.length;
    setText($("left-out"), `${unseen} more sessions with fewer bytes are not shown; robots may be among them.`);
    $("left-out").hidden = unseen <= 0;
  },
  onRefused(refusal) {
    tell("refused", "Not connected");
    notify(hasKey() ? "This key is not accepted." : refusal.status === 401 ? "This gateway needs an admin key." : refusal.message);
    askForKey(true);
  },
  onBreak(words, waitMs) {
    tell("disconnected", "Connection lost, reconnecting …");
    notify(`${words}. What is shown may be old; trying again in ${waitMs / 1000} s.`);
  },
});

function tell(connection, words) {
  state.connection = connection;
  document.body.dataset.state = connection === "refused" ? "disconnected" : connection;
  setText($("state"), words);
}

function notify(words) {
  setText($("notice"), words ?? "");
  $("notice").hidden = !words;
}

function askForKey(wanted) {
  if (wanted === !$("key-form").hidden) return;
  $("key-form").hidden = !wanted;
  if (wanted) $("key").focus();
}

// A stop is never asked about twice: it is pressed in a hurry, and harms nothing.
async function stop(id, stopped) {
  await say(id, `sessions/${encodeURIComponent(id)}/${stopped ? "stop" : "release"}`, (answer) =>
    answer.stopped ? "stands still." : "goes on.",
  );
}

async function stopAll(stopped) {
  await say("All robots", `robots/${stopped ? "stop" : "release"}`, () => (stopped ? "stand still." : "go on."));
}

async function say(who, path, words) {
  try {
    sayOutcome(`${who} ${words(await ask("POST", path))}`, false);
  } catch (problem) {
    sayOutcome(`${who}: ${said(problem)}.`, true);
  }
}

async function look(id) {
  try {
    view.showCameras(id, await ask("GET", `sessions/${encodeURIComponent(id)}/cameras`));
    sayOutcome("", false);
  } catch (problem) {
    sayOutcome(`${id}: ${said(problem)}.`, true);
  }
}

function said(problem) {
  const words = problem instanceof Refusal ? problem.message : "the gateway does not answer";
  return words.replace(/\.$/, "");
}

function sayOutcome(words, refused) {
  $("outcome").classList.toggle("refused", refused);
  setText($("outcome"), words);
}

$("stop-all").addEventListener("click", () => stopAll(true));
$("release-all").addEventListener("click", () => stopAll(false));
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = $("key").value.trim();
  $("key").value = "";
  if (!/^[\x21-\x7e]+$/.test(key)) {
    notify("This key cannot be sent by a browser.");
    return;
  }
  saveKey(key);
  tell("connecting", "Connecting …");
  live.start();
});
// A page that nobody sees takes the place of one that somebody wants to see.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    live.stop();
    if (state.connection !== "refused") tell("away", "Not looking");
  } else if (state.connection !== "refused") {
    live.start();
  }
});

window.antiphon = {
  get state() {
    return { ...state, key: hasKey() };
  },
};

live.start();
