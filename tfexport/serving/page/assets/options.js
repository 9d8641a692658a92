// The options of a search as a form. Names, types, bounds and help come from the server's OpenAPI schema.

import { remember, remembered } from "./store.js";

// What most people try, in words of their own: title and help. All others stand below "All options".
const CHOSEN = {
  beam: ["Beam", "Hypotheses that the search keeps at each step; 1 is greedy."],
  nbest: ["Hypotheses (n-best)", "Number of hypotheses to show, best first."],
  length_penalty: ["Length penalty", "Larger values prefer longer outputs."],
  max_length: ["Largest length", "In tokens."],
  samples: ["Samples", "Number of outputs to draw instead of searching for the best."],
  temperature: ["Temperature", "For samples: below 1, likely tokens become more likely."],
  attention: ["Attention", "Show what each token attends to."],
};
// What the page itself says in each request, and what is no text or number.
const OWN = [
  ...["text", "tokens", "ids", "stream", "model", "source", "target", "priority", "scores", "token_scores", "alignments"],
  ...["constraints", "glossary"],
];
const START = { beam: 4, nbest: 3, attention: true };

// What an option needs of others to mean anything. The server refuses it otherwise; the page leaves it out and greys it.
const NEEDS = {
  beam: (given) => !(given.samples > 0),
  nbest: (given) => !(given.samples > 0) && !(given.alternatives > 0) && given.beam > 1,
  patience: (given) => !(given.samples > 0) && given.beam > 1,
  samples: (given) => !(given.alternatives > 0),
  temperature: (given) => given.samples > 0,
  top_k: (given) => given.samples > 0,
  top_p: (given) => given.samples > 0,
  seed: (given) => given.samples > 0,
  min_alternative_prob: (given) => given.alternatives > 0,
  early_stopping: (given) => given.profile === "hf",
  keep_between: (given) => !(given.samples > 0) && !(given.alternatives > 0),
  force_eos: (given) => given.profile === "hf",
};

export class Options {
  #given = { ...START, ...remembered("options", {}) };
  #fields = new Map();
  #changed;

  constructor(changed) {
    this.#changed = changed;
  }

  // Fills the form from the schema; only with what it knows, so that an option which is gone is not sent for ever.
  draw(schema, chosen, all) {
    const names = Object.keys(schema).filter((name) => !OWN.includes(name));
    this.#given = Object.fromEntries(Object.entries(this.#given).filter(([name]) => names.includes(name)));
    const panels = new Map();
    for (const name of names) {
      const field = new Field(name, schema[name], CHOSEN[name] ?? [], (value) => this.#set(name, value));
      this.#fields.set(name, field);
      if (name in CHOSEN) continue;
      const panel = schema[name]["x-panel"] ?? "Others";
      panels.set(panel, [...(panels.get(panel) ?? []), field]);
    }
    chosen.replaceChildren(...Object.keys(CHOSEN).flatMap((name) => this.#fields.get(name)?.element ?? []));
    all.replaceChildren(...[...panels].map(([panel, fields]) => groupOf(panel, fields)));
    this.#show();
  }

  reset() {
    this.#given = { ...START };
    this.#show();
    this.#changed();
  }

  // A request for a line; tells what each request of the page needs beside the options.
  requestOf(line, model) {
    const options = this.#applicable();
    const several = options.samples > 1 || options.alternatives > 0;
    if (options.nbest > options.beam) options.nbest = options.beam;
    if (!model.attention) delete options.attention;
    // Several outputs of equal rank are no stream: the server sends them at once.
    return { model: model.name, text: line, ...options, token_scores: true, stream: !several };
  }

  #applicable() {
    const beam = this.#given.beam ?? 1;
    const entries = Object.entries(this.#given);
    return Object.fromEntries(entries.filter(([name]) => NEEDS[name]?.({ ...this.#given, beam }) ?? true));
  }

  #set(name, value) {
    if (value === null) delete this.#given[name];
    else this.#given[name] = value;
    this.#show();
    this.#changed();
  }

  #show() {
    remember("options", this.#given);
    const given = { ...this.#given, beam: this.#given.beam ?? 1 };
    for (const [name, field] of this.#fields) field.show(this.#given[name], NEEDS[name]?.(given) ?? true);
  }
}

function groupOf(panel, fields) {
  const group = document.createElement("fieldset");
  const legend = document.createElement("legend");
  legend.textContent = panel;
  const grid = document.createElement("div");
  grid.className = "fields";
  grid.append(...fields.map((field) => field.element));
  group.append(legend, grid);
  return group;
}

class Field {
  // `changed` is called with the value; null where the field is empty, which is the default.
  constructor(name, schema, [title, help], changed) {
    this.types = (schema.anyOf ?? [schema]).filter((one) => one.type !== "null");
    this.input = this.#input(name, schema["x-default"]);
    this.input.id = `option-${name}`;
    this.input.addEventListener("change", () => {
      if (this.#check()) changed(this.#value());
    });
    this.element = document.createElement("div");
    this.element.className = "field";
    const label = document.createElement("label");
    label.htmlFor = this.input.id;
    label.textContent = title ?? name.replaceAll("_", " ").replace(/^./, (first) => first.toUpperCase());
    this.help = help ?? helpOf(schema.description);
    this.note = document.createElement("p");
    this.note.id = `${this.input.id}-help`;
    this.note.className = "note";
    this.input.setAttribute("aria-describedby", this.note.id);
    this.element.append(label, this.input, this.note);
  }

  // What is wrong with the value takes the place of the help.
  #check() {
    const isValid = this.input.checkValidity();
    this.input.setAttribute("aria-invalid", String(!isValid));
    this.note.textContent = isValid ? this.help : this.input.validationMessage;
    this.note.classList.toggle("problem", !isValid);
    return isValid;
  }

  #input(name, fallback) {
    const [type] = this.types;
    const options = type.type === "boolean" ? [["true", "On"], ["false", "Off"]] : type.enum?.map((one) => [one, one]);
    if (options) {
      const select = document.createElement("select");
      const first = type.type === "boolean" ? (fallback ? "On" : "Off") : fallback;
      for (const [value, text] of [["", `Default${first === undefined || first === null ? "" : `: ${first}`}`], ...options]) {
        select.add(new Option(text, value));
      }
      return select;
    }
    const input = document.createElement("input");
    input.autocomplete = "off";
    if (type.type === "integer" || type.type === "number") {
      input.type = "number";
      input.step = type.type === "integer" ? "1" : "any";
      input.min = type.minimum ?? type.exclusiveMinimum ?? "";
      input.max = type.maximum ?? "";
    } else {
      input.spellcheck = false;
    }
    input.placeholder = Array.isArray(fallback) ? "" : String(fallback ?? "");
    return input;
  }

  #value() {
    const text = this.input.value.trim();
    if (!text) return null;
    const [type] = this.types;
    if (type.type === "boolean") return text === "true";
    return type.type === "integer" || type.type === "number" ? Number(text) : text;
  }

  show(value, isOfUse) {
    this.input.disabled = !isOfUse;
    this.input.value = value ?? "";
    this.#check();
  }
}

// The help is that of the command line: its flags are the fields of this form.
function helpOf(text = "") {
  return text.replace(/--([a-z][a-z-]*)/g, (_, flag) => flag.replaceAll("-", " "));
}
