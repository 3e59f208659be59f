// The operator's page: what the gateway's workers hold, and for which sessions.

import { AdminPage } from "./admin-page.js";
import { Refusal, ask } from "./admin.js";
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
  chosen: null, // the id of the session whose timeline is shown
  noted: undefined, // how many entries its timeline had when it was asked for
};

const table = new SessionsTable({ onChoose: choose, onAction: act });

const page = new AdminPage({
  own: () => state,
  onDocument(overview) {
    showWorkers(overview.workers);
    showPipelines(overview.pipelines);
    showWaiting(overview.waiting);
    table.show(overview.sessions, overview.sessions_total);
    lookAtChosen();
  },
});

async function act(action, id) {
  const path = `sessions/${encodeURIComponent(id)}`;
  try {
    const answer = await (action === "close" ? ask("DELETE", path) : ask("POST", `${path}/${action}`));
    page.sayOutcome(`${id} ${OUTCOMES[action](answer)}`);
  } catch (problem) {
    page.sayProblem(id, problem);
  }
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
