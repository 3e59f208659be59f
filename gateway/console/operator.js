// The operator's page: what the gateway's workers hold, and for which sessions.

import { Live, Refusal, ask, hasKey, saveKey } from "./admin.js";
import { setText } from "./dom.js";
import { showPipelines, showWaiting, showWorkers } from "./ledger-view.js";
import { SessionsTable } from "./sessions-view.js";
import { showChosen, showFacts, showForgotten, showTimeline } from "./timeline-view.js";

const $ = (id) => document.getElementById(id);

const OUTCOMES = {
  park: ({ parked }) => `is put away: ${parked.join(", ")}.`,
  restore: ({ restored, lost }) => {
    const stages = Object.entries(restored).map(([stage, origin]) => `${stage} (${origin})`);
    const losses = Object.values(lost).map((why) => ` ${why}.`);
    return (stages.length ? `is brought back: ${stages.join(", ")}.` : "has nothing that is parked.") + losses.join("");
  },
  evict: () => "ends, to make room.",
  close: () => "is closed.",
};

const state = {
  connection: "connecting", // connected, disconnected, refused, away
  documents: 0,
  chosen: null, // the id of the session whose timeline is shown
  noted: undefined, // how many entries its timeline had when it was asked for
};

const live = new Live({
  onDocument(overview) {
    state.documents += 1;
    tell("connected", overview.draining ? "The gateway is draining" : "Live");
    notify(null);
    askForKey(false);
    showWorkers(overview.workers);
    showPipelines(overview.pipelines);
    showWaiting(overview.waiting);
    table.show(overview.sessions, overview.sessions_total);
    lookAtChosen();
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

const table = new SessionsTable({ onChoose: choose, onAction: act });

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

async function act(action, id) {
  const path = `sessions/${encodeURIComponent(id)}`;
  try {
    const answer = await (action === "close" ? ask("DELETE", path) : ask("POST", `${path}/${action}`));
    sayOutcome(`${id} ${OUTCOMES[action](answer)}`, false);
  } catch (problem) {
    const words = problem instanceof Refusal ? problem.message : "the gateway does not answer";
    sayOutcome(`${id}: ${words.replace(/\.$/, "")}.`, true);
  }
}

function sayOutcome(words, refused) {
  $("outcome").classList.toggle("refused", refused);
  setText($("outcome"), words);
}

function choose(id) {
  state.chosen = state.chosen === id ? null : id;
  state.noted = table.find(id)?.noted;
  table.choose(state.chosen);
  showChosen(state.chosen);
  if (state.chosen === null) return;
  $("chosen").scrollIntoView({ block: "nearest" });
  askForTimeline();
}

// Its timeline is asked for when it has become longer, and once more after its end.
function lookAtChosen() {
  if (state.chosen === null) return;
  const session = table.find(state.chosen);
  if (session) showFacts(session);
  if (session?.noted === state.noted) return;
  state.noted = session?.noted;
  askForTimeline();
}

async function askForTimeline() {
  const { chosen } = state;
  try {
    const session = await ask("GET", `sessions/${encodeURIComponent(chosen)}`);
    if (chosen !== state.chosen) return;
    showFacts(session);
    showTimeline(session.timeline);
  } catch (problem) {
    if (chosen === state.chosen && problem instanceof Refusal && problem.status === 404) showForgotten();
  }
}

$("unchoose").addEventListener("click", () => {
  const { choose: button } = table.rows.get(state.chosen) ?? {};
  choose(state.chosen);
  button?.focus();
});
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
