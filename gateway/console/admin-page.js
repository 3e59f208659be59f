// What the pages of an operator have in common: the connection, the key, and what is said of both.

import { Live, Refusal, hasKey, saveKey } from "./admin.js";
import { element, setText } from "./dom.js";

export class AdminPage {
  // onDocument(overview) is told what there is, each time that it has changed. `own()` gives what
  // the page itself adds to the state that `window.antiphon` has.
  constructor({ onDocument, own = () => ({}) }) {
    this.connection = "connecting"; // connected, disconnected, refused, away
    this.documents = 0;
    this.state = document.getElementById("state");
    this.outcome = document.getElementById("outcome");
    this.#makeMessages(document.getElementById("messages"));
    this.live = new Live({
      onDocument: (overview) => {
        this.documents += 1;
        this.#tell("connected", overview.draining ? "The gateway is draining" : "Live");
        this.#notify(null);
        this.#askForKey(false);
        onDocument(overview);
      },
      onRefused: (refusal) => {
        this.#tell("refused", "Not connected");
        this.#notify(hasKey() ? "This key is not accepted." : refusal.status === 401 ? "This gateway needs an admin key." : refusal.message);
        this.#askForKey(true);
      },
      onBreak: (words, waitMs) => {
        this.#tell("disconnected", "Connection lost, reconnecting …");
        this.#notify(`${words}. What is shown may be old; trying again in ${waitMs / 1000} s.`);
      },
    });
    // A page that nobody sees takes the place of one that somebody wants to see.
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) {
        this.live.stop();
        if (this.connection !== "refused") this.#tell("away", "Not looking");
      } else if (this.connection !== "refused") {
        this.live.start();
      }
    });
    const page = this;
    window.antiphon = {
      get state() {
        return { connection: page.connection, documents: page.documents, ...own(), key: hasKey() };
      },
    };
    this.live.start();
  }

  // What came of something that was asked for: `words`, and whether it was refused.
  sayOutcome(words, refused = false) {
    this.outcome.classList.toggle("refused", refused);
    setText(this.outcome, words);
  }

  // That `who` did not get what was asked for.
  sayProblem(who, problem) {
    const words = problem instanceof Refusal ? problem.message : "the gateway does not answer";
    this.sayOutcome(`${who}: ${words.replace(/\.$/, "")}.`, true);
  }

  #makeMessages(card) {
    this.notice = element("p", { id: "notice", role: "alert", hidden: "" });
    this.key = element("input", { id: "key", type: "password", autocomplete: "off", required: "" });
    this.keyForm = element(
      "form",
      { id: "key-form", hidden: "" },
      element("label", { for: "key", text: "Admin key of this gateway" }),
      element("div", { className: "row" }, this.key, element("button", { type: "submit", className: "primary", text: "Use key" })),
      element("p", { className: "hint", text: "Kept in this tab only, until it is closed." }),
    );
    this.keyForm.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#useKey();
    });
    card.append(this.notice, this.keyForm);
  }

  #useKey() {
    const key = this.key.value.trim();
    this.key.value = "";
    if (!/^[\x21-\x7e]+$/.test(key)) {
      this.#notify("This key cannot be sent by a browser.");
      return;
    }
    saveKey(key);
    this.#tell("connecting", "Connecting …");
    this.live.start();
  }

  #tell(connection, words) {
    this.connection = connection;
    document.body.dataset.state = connection === "refused" ? "disconnected" : connection;
    setText(this.state, words);
  }

  #notify(words) {
    setText(this.notice, words ?? "");
    this.notice.hidden = !words;
  }

  #askForKey(wanted) {
    if (wanted === !this.keyForm.hidden) return;
    this.keyForm.hidden = !wanted;
    if (wanted) this.key.focus();
  }
}
