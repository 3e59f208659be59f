// Workers with the budgets of their devices, pipelines with their places, and who waits.

import { element, show } from "./dom.js";
import { inUnits, size, title } from "./units.js";

const $ = (id) => document.getElementById(id);

const GOOD = new Set(["ready"]);
const BAD = new Set(["lost", "wedged", "full"]);

export function showWorkers(workers) {
  show($("workers"), workers, (all) => all.map(worker));
}

function worker(known) {
  const numbers = [
    `stage ${known.stage}`,
    `${known.sessions} ${known.sessions === 1 ? "session" : "sessions"}`,
    `${known.waiting} waiting`,
    `${size(known.resident_bytes)} resident`,
  ];
  return element(
    "li",
    {},
    element("h3", { text: known.worker }, tag(known.state)),
    element("p", { className: "hint", text: numbers.join(", ") }),
    ...Object.entries(known.devices).map(([name, held]) => device(name, held)),
  );
}

function device(name, held) {
  // What no session has taken of the pool; the sessions' part of it is theirs.
  const pool = Math.max(held.pool - held.sessions, 0);
  const { engine, sessions, kept, arena, budget, free, undeclared } = held;
  const accounts = { engine, pool, sessions, kept, arena };
  if (free !== null) accounts.free = free;
  const whole = budget === null ? size(held.reserved) : `${size(held.reserved)} of ${size(budget)}`;
  const over = free !== null && free < 0;
  const bar = element("div", { className: over ? "bar over" : "bar", "aria-hidden": "true" });
  for (const [account, bytes] of Object.entries(accounts)) {
    const part = element("div", { className: account });
    part.style.setProperty("--share", String(Math.max(bytes, 0)));
    if (bytes <= 0) part.dataset.none = "";
    bar.append(part);
  }
  const rows = Object.entries(accounts).map(([account, bytes]) =>
    element(
      "div",
      {},
      element("i", { className: account, "aria-hidden": "true" }),
      element("dt", { text: account }),
      element("dd", { text: size(bytes) }),
    ),
  );
  const said = [element("b", { text: name }), ` ${whole}`];
  if (over) said.push(" (over its budget)");
  if (undeclared > 0) said.push(`, ${size(undeclared)} of it undeclared`);
  return element("div", { className: "device" }, element("p", {}, ...said), bar, element("dl", { className: "accounts" }, ...rows));
}

export function showPipelines(pipelines) {
  show($("pipelines"), pipelines, (all) => Object.entries(all).map(([name, known]) => pipeline(name, known)));
}

function pipeline(name, known) {
  const states = [known.ready ? "ready" : "not ready"];
  if (known.capacity === "full") states.push("full");
  const places = `${known.sessions} of ${known.session_limit} places taken`;
  const stages = Object.entries(known.stages).map(([stage, health]) =>
    element("span", { text: `${stage} ` }, tag(health), " "),
  );
  return element(
    "li",
    {},
    element("h3", { text: name }, ...states.map(tag)),
    element("p", { text: known.required ? `${places}, required` : places }),
    element("p", { className: "hint" }, ...stages),
  );
}

function tag(state) {
  const kind = GOOD.has(state) ? " good" : BAD.has(state) ? " bad" : "";
  return element("span", { className: `tag${kind}`, text: state });
}

// Opens in their order; without the member nobody can wait.
export function showWaiting(waiting) {
  $("waiting").hidden = !waiting?.length;
  const names = [...new Set((waiting ?? []).flatMap(Object.keys))];
  show($("waiting-heads"), names, () => names.map((name) => element("th", { scope: "col", text: title(name) })));
  show($("waiting-rows"), waiting ?? [], (all) =>
    all.map((entry) => element("tr", {}, ...names.map((name) => element("td", { text: inUnits(name, entry[name]) })))),
  );
}
