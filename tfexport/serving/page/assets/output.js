// The pane of the translation: a paragraph for each line of the source, with what is wrong with it, if anything.

import { textOf } from "./translator.js";

// What a status of the server says where it comes without a message.
const STATUSES = {
  length_limit: "It ended at the length limit.",
  phrases_missing: "It lacks a required phrase.",
  too_long: "The line is too long for this model.",
  unknown_token: "The line has a token that the model does not know.",
  tokenizer_error: "The line cannot be split into tokens.",
};

export class Output {
  #pane;
  #rows = [];

  // `chosen` is called with the index of a line that is clicked.
  constructor(pane, chosen) {
    this.#pane = pane;
    pane.addEventListener("click", (event) => {
      const index = this.#rows.findIndex(({ row }) => row.contains(event.target));
      if (index >= 0) chosen(index);
    });
  }

  // Shows an entry for each line; null for an empty one. Text comes in as text, never as HTML.
  show(entries, active) {
    while (this.#rows.length > entries.length) this.#rows.pop().row.remove();
    while (this.#rows.length < entries.length) this.#rows.push(this.#newRow());
    const now = performance.now();
    for (const [index, entry] of entries.entries()) {
      const { row, text, note } = this.#rows[index];
      const hasBegun = entry?.state !== "queued" && entry?.state !== "waiting";
      // Until the first token comes, the line keeps what it had.
      if (hasBegun) setText(text, textOf(entry));
      const classes = { stale: !hasBegun, growing: entry?.state === "streaming", active: entries.length > 1 && index === active };
      for (const [name, isSet] of Object.entries(classes)) row.classList.toggle(name, isSet);
      setText(note, noteOf(entry, now));
      note.hidden = !note.textContent;
    }
  }

  #newRow() {
    const row = document.createElement("div");
    row.className = "line";
    const text = document.createElement("p");
    text.dir = "auto";
    const note = document.createElement("p");
    note.className = "note problem";
    note.hidden = true;
    row.append(text, note);
    this.#pane.append(row);
    return { row, text, note };
  }
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function noteOf(entry, now) {
  if (entry?.state === "pausing") {
    const seconds = Math.max(1, Math.ceil((entry.retryAt - now) / 1000));
    return `${entry.error.message} Next try in ${seconds} s.`;
  }
  if (entry?.state === "failed") return "Not translated.";
  if (entry?.state === "stopped") return "Stopped.";
  const { status, message } = entry?.result ?? { status: "ok" };
  if (status === "ok") return "";
  return message ? `${status}: ${message}` : (STATUSES[status] ?? status);
}
