// One session: what is known of it, and what became of it.

import { element, setText, show } from "./dom.js";
import { bytesOf } from "./sessions-view.js";
import { inUnits, size, title } from "./units.js";

const $ = (id) => document.getElementById(id);

const APART = new Set(["id", "timeline", "noted", "bytes"]);
const SHOWN = {
  tenant: "tenant",
  kind: "kind",
  idle_left_s: "idle time left",
  age_left_s: "age left",
  grace_left_s: "time left to come back",
};

export function showChosen(id) {
  $("chosen").hidden = id === null;
  if (id === null) return;
  setText($("chosen-title"), id);
  show($("facts"), {}, () => []);
  show($("timeline"), [], () => []);
  $("dropped").hidden = true;
}

export function showFacts(session) {
  const facts = { bytes: size(bytesOf(session)) };
  for (const [stage, held] of Object.entries(session.bytes)) {
    for (const [device, bytes] of Object.entries(held)) facts[`${stage} on ${device}`] = size(bytes);
  }
  for (const [name, value] of Object.entries(session)) {
    if (APART.has(name) || value === null) continue;
    if (typeof value === "object" && Object.keys(value).length === 0) continue;
    facts[SHOWN[name] ?? title(name)] = Array.isArray(value) ? value.join(", ") : inUnits(name, value);
  }
  show($("facts"), facts, (all) =>
    Object.entries(all).map(([name, words]) => element("div", {}, element("dt", { text: name }), element("dd", { text: words }))),
  );
}

export function showTimeline({ dropped, entries }) {
  $("dropped").hidden = dropped === 0;
  setText($("dropped"), `${dropped} earlier entries are not kept.`);
  show($("timeline"), entries, (all) => all.map(line));
}

export function showForgotten() {
  const words = "The gateway knows it no more.";
  show($("facts"), words, () => [element("div", { text: words })]);
}

function line({ at_ms, event, ...details }) {
  const words = Object.entries(details).map(([name, value]) => `${title(name)} ${inUnits(name, value)}`);
  return element(
    "li",
    {},
    element("span", { className: "at", text: `${(at_ms / 1000).toFixed(3)} s` }),
    element("span", { text: event.replaceAll("_", " ") }),
    element("span", { className: "details", text: words.join(", ") }),
  );
}
