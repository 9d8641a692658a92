// What is behind one line: its hypotheses, the probability of each token, and what tokens attend to.

import { hypothesisOf, isOver } from "./translator.js";
import { number, percent, textsOf } from "./pieces.js";

const MOST_NAMED = 3; // tokens in the sentence about one

const byId = (id) => document.getElementById(id);

export class Inspector {
  #shown = {}; // the entry and the hypothesis that are drawn
  #source = new TokenRow(byId("source-tokens"), (index) => this.#point("source", index), () => this.#target.letGo());
  #target = new TokenRow(byId("target-tokens"), (index) => this.#point("target", index), () => this.#source.letGo());
  #hypothesis = null;
  #chosen;

  // `chosen` is called with an entry whose hypothesis was changed.
  constructor(chosen) {
    this.#chosen = chosen;
  }

  show(entry, { model, languages }) {
    const hypothesis = hypothesisOf(entry);
    // While a line is translated anew, what was there stays.
    if (!hypothesis && entry && !isOver(entry)) return;
    byId("no-attention").hidden = Boolean(model?.attention) || !hypothesis;
    byId("source-tokens").lang = languages[0];
    byId("target-tokens").lang = languages[1];
    if (this.#shown.entry !== entry) this.#drawHypotheses(entry, languages[1]);
    if (this.#shown.entry !== entry || this.#shown.hypothesis !== hypothesis) this.#drawTokens(hypothesis);
    this.#shown = { entry, hypothesis };
  }

  // Chooses the next hypothesis, or the one before.
  move(entry, by) {
    const count = entry?.result?.hypotheses.length ?? 0;
    if (count > 1) this.#choose(entry, (entry.chosen + by + count) % count);
  }

  #choose(entry, index) {
    entry.chosen = index;
    const radio = byId("hypotheses").querySelector(`input[value="${index}"]`);
    if (radio && this.#shown.entry === entry) radio.checked = true;
    this.#chosen(entry);
  }

  #drawHypotheses(entry, language) {
    const found = entry?.result?.hypotheses ?? [];
    const legend = document.createElement("legend");
    const title = document.createElement("span");
    title.textContent = found.length > 1 ? "Hypotheses" : "Hypothesis";
    const heading = document.createElement("span");
    Object.assign(heading, { className: "score", textContent: "score" });
    heading.setAttribute("aria-hidden", "true"); // each score says that it is one
    legend.append(title, heading);
    const rows = found.map((hypothesis, index) => {
      const label = document.createElement("label");
      const radio = document.createElement("input");
      Object.assign(radio, { type: "radio", name: "hypothesis", value: String(index), checked: index === entry.chosen });
      radio.addEventListener("change", () => this.#choose(entry, index));
      const text = document.createElement("span");
      Object.assign(text, { textContent: hypothesis.text || "(empty)", dir: "auto", lang: language });
      const score = document.createElement("span");
      Object.assign(score, { className: "score", textContent: number(hypothesis.score, 3) });
      score.title = `score ${hypothesis.score}, log-probability ${hypothesis.log_prob}`;
      const name = document.createElement("span");
      Object.assign(name, { className: "visually-hidden", textContent: ", score " });
      label.append(radio, text, name, score);
      return label;
    });
    byId("hypotheses").replaceChildren(legend, ...rows);
    byId("hypotheses").hidden = !found.length;
  }

  #drawTokens(hypothesis) {
    this.#hypothesis = hypothesis ?? null;
    const tokens = hypothesis?.tokens ?? [];
    byId("tokens").hidden = !tokens.length;
    const texts = textsOf(tokens);
    const chances = (hypothesis?.token_log_probs ?? []).map((value) => (value === null ? 0 : Math.exp(value)));
    this.#target.draw(texts, (index) => ({ chance: chances[index], label: this.#aboutTarget(index) }));
    const [from, to] = hypothesis?.source_text ?? [0, 0];
    const sources = hypothesis?.attention ? textsOf(hypothesis.source_tokens) : [];
    this.#source.draw(sources, (index) => ({ isSpecial: index < from || index >= to, label: this.#aboutSource(index) }));
    for (const id of ["source-tokens", "source-tokens-label", "attention-legend"]) byId(id).hidden = !sources.length;
    this.#point("target", null);
  }

  // Shades the other side by the attention of a token, and says what is known of it; null for none.
  #point(side, index) {
    const other = side === "target" ? this.#source : this.#target;
    if (index === null && other.kept !== null) [side, index] = [side === "target" ? "source" : "target", other.kept];
    const attention = this.#hypothesis?.attention;
    const isTarget = side === "target";
    if (attention && index !== null) {
      const weights = isTarget ? attention[index] : attention.map((row) => row[index]);
      (isTarget ? this.#source : this.#target).shade(weights);
      (isTarget ? this.#target : this.#source).shade(null);
    } else {
      this.#source.shade(null);
      this.#target.shade(null);
    }
    const about = isTarget ? (one) => this.#aboutTarget(one) : (one) => this.#aboutSource(one);
    byId("token-detail").textContent = index === null ? this.#hint() : about(index);
    byId("token-detail").classList.toggle("is-hint", index === null);
  }

  #hint() {
    return this.#hypothesis?.attention
      ? "Point at a token, or go to it with Tab and the arrow keys, to see its probability and what it attends to."
      : "Point at a token, or go to it with Tab and the arrow keys, to see its probability.";
  }

  #aboutTarget(index) {
    const { tokens, ids, token_log_probs: logs, attention, source_tokens: sources } = this.#hypothesis;
    const said = [textsOf(tokens)[index]];
    if (logs?.[index] !== undefined) {
      const chance = logs[index] === null ? 0 : Math.exp(logs[index]);
      said.push(`probability ${percent(chance)} (log ${number(logs[index], 4)})`);
    }
    said.push(`id ${ids[index]}`);
    if (attention) said.push(`attends to ${named(textsOf(sources), attention[index])}`);
    return said.join(", ");
  }

  #aboutSource(index) {
    const { tokens, attention, source_tokens: sources } = this.#hypothesis;
    const weights = attention.map((row) => row[index]);
    return `${textsOf(sources)[index]}, gets most attention from ${named(textsOf(tokens), weights)}`;
  }
}

function named(texts, weights) {
  const order = weights.map((_, index) => index).sort((one, other) => weights[other] - weights[one]);
  return order.slice(0, MOST_NAMED).map((index) => `${texts[index]} ${percent(weights[index])}`).join(", ");
}

// A row of tokens: one stop of the Tab key, within which arrow keys move (the toolbar pattern of ARIA).
class TokenRow {
  #row;
  #pointed;
  #keeps;
  #focused = null;
  kept = null; // the index of a token that stays pointed at

  // `pointed` is called with the index of the token that is pointed at, focused or kept; null when there is none.
  // `keeps` is called when one is kept.
  constructor(row, pointed, keeps) {
    this.#row = row;
    this.#pointed = pointed;
    this.#keeps = keeps;
    row.addEventListener("keydown", (event) => this.#key(event));
    row.addEventListener("pointerover", (event) => this.#over(event));
    row.addEventListener("pointerleave", () => this.#tell());
    row.addEventListener("focusin", (event) => this.#focus(event.target));
    row.addEventListener("focusout", () => {
      this.#focused = null;
      this.#tell();
    });
    row.addEventListener("click", (event) => this.#keep(event.target.closest("button")));
  }

  draw(texts, about) {
    this.kept = this.#focused = null;
    const buttons = texts.map((text, index) => {
      const { chance, isSpecial, label } = about(index);
      const button = document.createElement("button");
      Object.assign(button, { type: "button", className: "token", tabIndex: index ? -1 : 0 });
      button.setAttribute("aria-label", label);
      button.setAttribute("aria-pressed", "false");
      button.classList.toggle("special", Boolean(isSpecial));
      const piece = document.createElement("span");
      piece.textContent = text;
      button.append(piece);
      if (chance !== undefined) {
        const bar = document.createElement("span");
        bar.className = "bar-of-chance";
        button.classList.add("weighed");
        button.style.setProperty("--chance", chance);
        button.append(bar);
      }
      return button;
    });
    this.#row.replaceChildren(...buttons);
  }

  // Shows how much each token is attended to, from 0 to 1; null for none.
  shade(weights) {
    for (const [index, button] of [...this.#row.children].entries()) {
      button.classList.toggle("shaded", weights !== null);
      if (weights) button.style.setProperty("--weight", weights[index]);
    }
  }

  #indexOf(element) {
    return [...this.#row.children].indexOf(element);
  }

  #over(event) {
    const index = this.#indexOf(event.target.closest("button"));
    if (index >= 0) this.#pointed(index);
  }

  #focus(button) {
    this.#focused = this.#indexOf(button);
    for (const one of this.#row.children) one.tabIndex = one === button ? 0 : -1;
    this.#tell();
  }

  #keep(button) {
    if (!button) return;
    const index = this.#indexOf(button);
    this.kept = this.kept === index ? null : index;
    if (this.kept !== null) this.#keeps();
    this.#showKept();
    this.#pointed(index);
  }

  letGo() {
    this.kept = null;
    this.#showKept();
  }

  #showKept() {
    for (const [at, one] of [...this.#row.children].entries()) one.setAttribute("aria-pressed", String(at === this.kept));
  }

  #tell() {
    this.#pointed(this.#focused ?? this.kept);
  }

  #key(event) {
    const last = this.#row.children.length - 1;
    const index = this.#indexOf(event.target.closest("button"));
    const forward = getComputedStyle(this.#row).direction === "rtl" ? "ArrowLeft" : "ArrowRight";
    const back = forward === "ArrowRight" ? "ArrowLeft" : "ArrowRight";
    const to = { [forward]: Math.min(index + 1, last), [back]: Math.max(index - 1, 0), Home: 0, End: last }[event.key];
    if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    this.#row.children[to].focus();
  }
}
