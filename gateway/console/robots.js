// The robots' page: how each of them is answered, and the button that makes it stand still.

import { AdminPage } from "./admin-page.js";
import { ask } from "./admin.js";
import { setText } from "./dom.js";
import { RobotsView } from "./robots-view.js";

const $ = (id) => document.getElementById(id);

const view = new RobotsView({ onStop: stop, onLook: look });

const page = new AdminPage({
  onDocument(overview) {
    const held = Object.keys(overview.pipelines).filter((name) => overview.pipelines[name].stopped);
    setText($("held"), `All robots of ${held.join(", ")} stand still, those that come later too.`);
    $("held").hidden = held.length === 0;
    view.show(overview.sessions.filter(({ kind }) => kind === "robot"));
    const unseen = overview.sessions_total - overview.sessions.length;
    setText($("left-out"), `${unseen} more sessions with fewer bytes are not shown; robots may be among them.`);
    $("left-out").hidden = unseen <= 0;
  },
});

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
    page.sayOutcome(`${who} ${words(await ask("POST", path))}`);
  } catch (problem) {
    page.sayProblem(who, problem);
  }
}

async function look(id) {
  try {
    view.showCameras(id, await ask("GET", `sessions/${encodeURIComponent(id)}/cameras`));
    page.sayOutcome("");
  } catch (problem) {
    page.sayProblem(id, problem);
  }
}

$("stop-all").addEventListener("click", () => stopAll(true));
$("release-all").addEventListener("click", () => stopAll(false));
