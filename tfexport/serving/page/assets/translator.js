// Translates the lines of a text: each once, a few at a time, and only while somebody wants them.
//
//   text ──> lines ──> entries, by request ──> at most MOST_AT_ONCE running ──> changed(entry)
//
// An entry that is done is kept, so that a line which comes back, or moves, needs no request.

import { ServerError, translate, wasStopped } from "./api.js";

const MOST_AT_ONCE = 3;
const MOST_KEPT = 500;
const MOST_TRIES = 6;
const LONGEST_WAIT = 30;

export class Translator {
  #entries = new Map();
  #wanted = [];
  #running = 0;
  #changed;

  // `changed` is called with each entry that changed.
  constructor(changed) {
    this.#changed = changed;
  }

  // Wants these lines from now on, and stops what is no longer wanted. Returns an entry for each; null for an empty line.
  want(lines, requestOf) {
    const found = lines.map((line) => (line.trim() ? this.#entryOf(requestOf(line)) : null));
    this.#want([...new Set(found)].filter((entry) => entry !== null));
    return found;
  }

  // Stops what runs. `want` starts it again.
  stop() {
    this.#want([]);
  }

  // Stops those whose lines are not among these any more, and starts nothing.
  keepOnly(lines) {
    const kept = new Set(lines);
    this.#want(this.#wanted.filter((entry) => kept.has(entry.request.text)));
  }

  retry(entries) {
    for (const entry of entries) this.#entries.delete(entry.key);
  }

  get isBusy() {
    return this.#wanted.some((entry) => !isOver(entry));
  }

  #entryOf(request) {
    const key = JSON.stringify(request);
    const entry = this.#entries.get(key) ?? newEntry(key, request);
    this.#entries.delete(key); // the map's order is that of use
    this.#entries.set(key, entry);
    return entry;
  }

  #want(entries) {
    const wanted = new Set(entries);
    for (const entry of this.#wanted) if (!wanted.has(entry) && !isOver(entry)) this.#drop(entry);
    this.#wanted = entries;
    for (const entry of this.#entries.values()) {
      if (this.#entries.size <= MOST_KEPT) break;
      if (!wanted.has(entry)) this.#entries.delete(entry.key);
    }
    this.#start();
  }

  #drop(entry) {
    this.#entries.delete(entry.key);
    entry.controller.abort();
    entry.state = "stopped";
    this.#changed(entry);
  }

  #start() {
    for (const entry of this.#wanted) {
      if (this.#running >= MOST_AT_ONCE) return;
      if (entry.state === "queued") this.#run(entry);
    }
  }

  async #run(entry) {
    this.#running += 1;
    entry.state = "waiting";
    entry.began = performance.now();
    try {
      await this.#untilDone(entry);
    } catch (error) {
      if (!wasStopped(error)) {
        entry.state = "failed";
        entry.error = error instanceof ServerError ? error : new ServerError(`The page failed: ${error.message}.`, 500);
      }
    }
    this.#running -= 1;
    if (!entry.controller.signal.aborted) this.#changed(entry);
    this.#start();
  }

  // Tries again while the server is busy or gone, each time after a longer pause, or after the one that it asks for.
  async #untilDone(entry) {
    for (let tried = 1; ; tried += 1) {
      try {
        await this.#once(entry);
        return;
      } catch (error) {
        if (!(error instanceof ServerError) || !error.isPassing || tried >= MOST_TRIES) throw error;
        // Drawn, so that many pages do not come back at the same moment.
        const pause = Math.max(error.retryAfter ?? 0, 2 ** (tried - 1)) * (1 + Math.random() / 4);
        const seconds = Math.min(pause, Math.max(LONGEST_WAIT, error.retryAfter ?? 0));
        Object.assign(entry, { state: "pausing", error, retryAt: performance.now() + seconds * 1000 });
        this.#changed(entry);
        await sleep(seconds * 1000, entry.controller.signal);
        Object.assign(entry, { state: "waiting", error: null, text: "", steps: 0, first: null });
      }
    }
  }

  async #once(entry) {
    for await (const { name, value } of translate(entry.request, entry.controller.signal)) {
      const now = performance.now();
      if (name === "step") {
        entry.first ??= now;
        entry.text += value.text;
        entry.steps += 1;
        entry.state = "streaming";
      } else if (name === "result") {
        Object.assign(entry, { state: "done", result: value, ended: now, text: value.hypotheses[0]?.text ?? "" });
        entry.steps = value.hypotheses[0]?.ids.length ?? 0;
      }
      this.#changed(entry);
    }
  }
}

function newEntry(key, request) {
  return {
    key,
    request,
    state: "queued", // then waiting, streaming and done; or pausing, failed, stopped
    text: "", // of the output so far
    result: null,
    chosen: 0, // the hypothesis that stands for the line
    error: null,
    retryAt: null,
    began: null, // as performance.now() counts
    first: null, // when its first token came; null where tokens are not streamed
    ended: null,
    steps: 0,
    controller: new AbortController(),
  };
}

export function isOver(entry) {
  return ["done", "failed", "stopped"].includes(entry.state);
}

// The hypothesis that stands for a line; undefined while there is none.
export function hypothesisOf(entry) {
  return entry?.result?.hypotheses[entry.chosen];
}

export function textOf(entry) {
  return hypothesisOf(entry)?.text ?? entry?.text ?? "";
}

function sleep(milliseconds, signal) {
  return new Promise((done, stopped) => {
    const timer = setTimeout(done, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      stopped(signal.reason);
    }, { once: true });
  });
}
