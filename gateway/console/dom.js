// Making elements. Whatever comes from a gateway or its clients is text, never markup.

export function element(name, { text, className, ...attributes } = {}, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Leaves the node alone when nothing changed: neither a selection nor a screen reader is
// disturbed.
export function setText(node, words) {
  if (node.textContent !== words) node.textContent = words;
}

const shown = new WeakMap();

// Shows `value` in `node` by replacing its children with those of `make(value)`, if it differs
// from what is shown.
export function show(node, value, make) {
  const now = JSON.stringify(value);
  if (shown.get(node) === now) return;
  shown.set(node, now);
  node.replaceChildren(...make(value));
}
