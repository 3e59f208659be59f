// The keys of the page. They can be switched off: single keys get in the way of some
// people's speech control and screen readers.

const TYPING = "input:not([type=checkbox]), textarea";
const OWN_USE_OF_SPACE = `${TYPING}, input, button, a, summary`;

export function listenForKeys(enabled, { talk, mute, interrupt }) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    if (event.key === "Escape") {
      interrupt();
      return;
    }
    if (event.repeat || !enabled()) return;
    if (event.key === " " && !event.target.closest(OWN_USE_OF_SPACE)) {
      event.preventDefault();
      talk();
    } else if (event.key.toLowerCase() === "m" && !event.target.closest(TYPING)) {
      mute();
    }
  });
}
