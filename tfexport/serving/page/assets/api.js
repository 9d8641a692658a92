// The server's addresses: what they are asked, and their errors in words.

import { apiKey } from "./store.js";

export class ServerError extends Error {
  // `status` is 0 where no answer came. `retryAfter` is in seconds; null where the server does not say.
  constructor(message, status = 0, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }

  // Whether the same request may succeed later.
  get isPassing() {
    return [0, 429, 503].includes(this.status);
  }

  get asksForKey() {
    return this.status === 401 || this.status === 403;
  }
}

async function answerTo(address, options = {}) {
  const key = apiKey();
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(address, { ...options, headers });
  } catch (error) {
    throw wasStopped(error) ? error : new ServerError("The server does not answer.");
  }
  if (!response.ok) throw await problemOf(response);
  return response;
}

async function problemOf(response) {
  let message = `The server answered with status ${response.status}.`;
  try {
    message = sentence((await response.json()).error) || message;
  } catch {
    // Not JSON: something between the page and the server answered.
  }
  const seconds = Number.parseFloat(response.headers.get("Retry-After"));
  return new ServerError(message, response.status, Number.isFinite(seconds) ? seconds : null);
}

function sentence(text) {
  const said = typeof text === "string" ? text.trim() : "";
  return said && said[0].toUpperCase() + said.slice(1) + (/[.!?]$/.test(said) ? "" : ".");
}

export function wasStopped(error) {
  return error instanceof DOMException && error.name === "AbortError";
}

export async function fetchModels() {
  return (await (await answerTo("v1/models")).json()).models;
}

// The options of a search as JSON Schema, by name.
export async function fetchOptions() {
  const { components } = await (await answerTo("openapi.json")).json();
  return components.schemas.TranslateRequest.properties;
}

// The events of one translation, `{name, value}`: a `step` for each token where `request.stream` is true, then a `result`.
export async function* translate(request, signal) {
  const response = await answerTo("v1/translate", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(request),
    signal,
  });
  let isOver = false;
  try {
    for await (const event of request.stream ? eventsOf(response.body) : resultOf(response)) {
      if (event.name === "error") throw new ServerError(sentence(event.value.error), 500);
      isOver ||= event.name === "result";
      yield event;
    }
  } catch (error) {
    if (error instanceof ServerError || wasStopped(error)) throw error;
  }
  if (!isOver) throw new ServerError("The connection ended in the middle of a translation.");
}

async function* resultOf(response) {
  const { results } = await response.json();
  yield { name: "result", value: results[0] };
}

// Server-sent events of a POST, which EventSource cannot make; https://html.spec.whatwg.org/multipage/server-sent-events.html
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  try {
    for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) {
      const parts = (waiting + value).split(/\r?\n\r?\n/);
      waiting = parts.pop();
      yield* parts.map(eventOf).filter((event) => event !== null);
    }
  } finally {
    // Also where nobody reads on: the server then stops decoding.
    await reader.cancel().catch(() => {});
  }
}

function eventOf(text) {
  let name = "message";
  const data = [];
  for (const line of text.split(/\r?\n/)) {
    const [, field, value] = /^([^:]*):? ?(.*)$/.exec(line);
    if (field === "event") name = value;
    if (field === "data") data.push(value);
  }
  return data.length ? { name, value: JSON.parse(data.join("\n")) } : null;
}
