// A card for each robot: its steps, what went wrong, its cameras and its stop button.

import { element, show } from "./dom.js";
import { duration } from "./units.js";

const $ = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 100;
const HEIGHT = 40;

const milliseconds = (ms) => (ms === null ? "–" : `${ms} ms`);

function facts({ state, idle_s, steps }) {
  const { safe } = steps;
  const reasons = Object.keys(safe).filter((reason) => reason !== "superseded");
  const given = reasons.reduce((sum, reason) => sum + safe[reason], 0);
  return {
    Session: state,
    "Last step": `${duration(idle_s)} ago`,
    Steps: steps.done,
    Failed: steps.failed,
    "p50": milliseconds(steps.p50_ms),
    "p99": milliseconds(steps.p99_ms),
    "Deadlines missed": steps.deadlines_missed,
    Superseded: steps.superseded + (safe.superseded ?? 0),
    "Not fresh": given ? `${given} (${reasons.map((reason) => `${reason} ${safe[reason]}`).join(", ")})` : 0,
  };
}

export class RobotsView {
  // onStop(id, stopped), onLook(id)
  constructor({ onStop, onLook }) {
    this.cards = new Map(); // id -> the parts of its card
    $("robots").addEventListener("click", ({ target }) => {
      const button = target.closest("button");
      if (button === null) return;
      const { id } = button.closest("li").dataset;
      if (button.dataset.action === "look") onLook(id);
      else onStop(id, button.dataset.action === "stop");
    });
  }

  // Cards stay where they are: whoever is about to press a button finds it where it was.
  show(robots) {
    const ids = new Set(robots.map(({ id }) => id));
    for (const [id, { card }] of this.cards) {
      if (ids.has(id)) continue;
      card.remove();
      this.cards.delete(id);
    }
    for (const robot of robots) this.#update(robot);
    $("no-robots").hidden = robots.length > 0;
  }

  showCameras(id, { age_s, pictures }) {
    const { cameras } = this.cards.get(id) ?? {};
    if (cameras === undefined) return;
    const figures = pictures.map(({ camera, width, height, png }) =>
      element(
        "figure",
        {},
        element("img", { src: `data:image/png;base64,${png}`, alt: `What ${camera} saw` }),
        element("figcaption", { text: `${camera}, ${width} × ${height}, ${duration(age_s)} ago` }),
      ),
    );
    cameras.replaceChildren(...(figures.length ? figures : [element("p", { className: "hint", text: "No pictures in its last observation." })]));
  }

  #update(robot) {
    const { card, stopped, list, line } = this.cards.get(robot.id) ?? this.#add(robot);
    if (robot.stopped) card.dataset.stopped = "";
    else delete card.dataset.stopped;
    stopped.hidden = !robot.stopped;
    show(list, facts(robot), (known) =>
      Object.entries(known).map(([name, value]) =>
        element("div", {}, element("dt", { text: name }), element("dd", { text: String(value) })),
      ),
    );
    draw(line, robot.steps.recent_ms);
  }

  #add({ id, pipeline }) {
    const stopped = element("span", { className: "tag bad", text: "stopped" });
    const list = element("dl", { className: "facts" });
    const cameras = element("div", { className: "cameras" });
    const line = document.createElementNS(SVG, "polyline");
    const steps = document.createElementNS(SVG, "svg");
    steps.setAttribute("class", "steps");
    steps.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    steps.setAttribute("preserveAspectRatio", "none");
    steps.setAttribute("role", "img");
    steps.append(line);
    const card = element(
      "li",
      {},
      element("h3", { text: id }, stopped),
      element("p", { className: "hint", text: pipeline }),
      list,
      steps,
      element(
        "div",
        { className: "actions" },
        element("button", { type: "button", className: "stop", text: "Stop", "data-action": "stop", "aria-label": `Stop ${id}` }),
        element("button", { type: "button", text: "Release", "data-action": "release", "aria-label": `Release ${id}` }),
        element("button", { type: "button", text: "Look", "data-action": "look", "aria-label": `Look through the cameras of ${id}` }),
      ),
      cameras,
    );
    card.dataset.id = id;
    const made = { card, stopped, list, cameras, line };
    this.cards.set(id, made);
    $("robots").append(card);
    return made;
  }
}

// The times of the last steps as a line from 0 to the longest.
function draw(line, times) {
  const longest = Math.max(...times, 1);
  const apart = WIDTH / Math.max(times.length - 1, 1);
  const points = times.map((ms, index) => `${(index * apart).toFixed(1)},${(HEIGHT - (ms / longest) * (HEIGHT - 2)).toFixed(1)}`);
  line.setAttribute("points", points.join(" "));
  const words = times.length ? `The last ${times.length} steps took ${Math.min(...times)} to ${Math.max(...times)} ms.` : "No steps yet.";
  line.parentElement.setAttribute("aria-label", words);
}
