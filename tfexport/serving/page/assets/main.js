// The page: what is typed, chosen and pressed, and what is shown of it.

import { fetchModels, fetchOptions } from "./api.js";
import { Inspector } from "./inspector.js";
import { Options } from "./options.js";
import { Output } from "./output.js";
import { counted, languageOf, seconds, tagOf } from "./pieces.js";
import { apiKey, remember, remembered, rememberTheme, setApiKey } from "./store.js";
import { isOver, textOf, Translator } from "./translator.js";

const PAUSE = 300; // milliseconds without a key after which a text is translated

const byId = (id) => document.getElementById(id);
const source = byId("source");

let models = [];
let entries = []; // one for each line of the text
let active = 0; // the line with the cursor, or that was chosen since
let began = 0; // when the last round of requests did
let timer = null;
let isDrawn = true;
let isAnnounced = true;

const translator = new Translator((entry) => {
  if (entry.state === "failed" && entry.error.asksForKey) askForKey(entry.error.message);
  if (entry.state === "pausing") announce(entry.error.message);
  draw();
});
const options = new Options(() => translateSoon());
const output = new Output(byId("target"), (index) => {
  active = index;
  draw();
});
const inspector = new Inspector((entry) => {
  announce(`Chosen: ${textOf(entry)}`);
  draw();
});

const model = () => models.find((one) => one.name === byId("model").value);
const reverse = () => models.find((one) => one.source && one.source === model()?.target && one.target === model()?.source);
const linesOf = (text) => text.replaceAll("\r", "").split("\n");

// Translation

function translateSoon(pause = PAUSE) {
  clearTimeout(timer);
  translator.keepOnly(linesOf(source.value));
  if (!source.value.trim()) pause = 0;
  timer = setTimeout(translateNow, pause);
}

function translateNow() {
  clearTimeout(timer);
  timer = null;
  if (!model()) return;
  const known = new Set(entries);
  began = performance.now();
  entries = translator.want(linesOf(source.value), (line) => options.requestOf(line, model()));
  isAnnounced &&= entries.every((entry) => known.has(entry));
  draw();
}

function tryAgain() {
  translator.retry(entries.filter((entry) => entry && ["failed", "stopped"].includes(entry.state)));
  if (models.length) translateNow();
  else loadModels();
}

// What is shown

function draw() {
  if (!isDrawn) return;
  isDrawn = false;
  requestAnimationFrame(() => {
    isDrawn = true;
    drawNow();
  });
}

function drawNow() {
  const isBusy = translator.isBusy;
  output.show(entries, activeLine());
  byId("target-hint").hidden = entries.some((entry) => entry);
  byId("target").setAttribute("aria-busy", String(isBusy));
  byId("stop").hidden = !isBusy;
  byId("copy").hidden = !entries.some((entry) => textOf(entry));
  byId("speed").textContent = speed();
  drawInspector();
  drawBanner();
  if (entries.some((entry) => entry?.state === "pausing")) setTimeout(draw, 500);
  if (!isAnnounced && entries.every((entry) => !entry || isOver(entry))) {
    isAnnounced = true;
    announceResult();
  }
}

function drawInspector() {
  const line = activeLine();
  const several = entries.length > 1;
  byId("inspector").hidden = !entries.some((entry) => entry?.result?.hypotheses.length);
  byId("inspector-title").textContent = several ? `Line ${line + 1} of ${entries.length}` : "Details";
  byId("previous-line").hidden = byId("next-line").hidden = !several;
  byId("previous-line").disabled = nextLine(line, -1) === line;
  byId("next-line").disabled = nextLine(line, 1) === line;
  inspector.show(entries[line], { model: model(), languages: [tagOf(model()?.source), tagOf(model()?.target)] });
}

// A problem of all lines is said once, above them; what is wrong with one line stands with it.
function drawBanner() {
  const failed = entries.filter((entry) => entry?.state === "failed");
  if (failed.length) showBanner(failed[0].error.message);
  else if (models.length) byId("banner").hidden = true;
}

function showBanner(text) {
  if (byId("banner-text").textContent !== text || byId("banner").hidden) byId("banner-text").textContent = text;
  byId("banner").hidden = false;
}

function speed() {
  const now = entries.filter((entry) => entry && entry.began !== null && entry.began >= began && entry.ended !== null);
  if (!now.length || translator.isBusy) return "";
  const firsts = now.map((entry) => entry.first).filter((first) => first !== null);
  const whole = Math.max(...now.map((entry) => entry.ended)) - began;
  const steps = now.reduce((sum, entry) => sum + entry.steps, 0);
  const said = firsts.length ? [`first token ${seconds(Math.min(...firsts) - began)}`] : [];
  return [...said, `${Math.round(steps / (whole / 1000)).toLocaleString("en")} tokens/s`, `${seconds(whole)} in all`]
    .map((part) => part.replaceAll(" ", "\u00a0")) // a narrow line breaks between them
    .join(" · ");
}

function announce(text) {
  byId("live").textContent = text;
}

function announceResult() {
  const texts = entries.map(textOf).filter(Boolean);
  if (!texts.length || entries.some((entry) => entry?.state === "failed")) return;
  announce(texts.length > 1 ? `Translated ${counted(texts.length, "line")}.` : `Translation: ${texts[0]}`);
}

// Models and languages

async function loadModels() {
  try {
    models = (await fetchModels()).filter((one) => one.task === "translate");
  } catch (error) {
    if (error.asksForKey) askForKey(error.message);
    showBanner(error.message);
    return;
  }
  byId("model").replaceChildren(...models.map((one) => new Option(nameOf(one), one.name)));
  const last = remembered("model", null);
  if (models.some((one) => one.name === last)) byId("model").value = last;
  byId("model").disabled = models.length < 2;
  if (!models.length) return showBanner("This server has no bundle that translates.");
  try {
    const schema = await fetchOptions();
    options.draw(schema, byId("chosen-options"), byId("all-options"));
    byId("more-options").hidden = false;
  } catch {
    byId("options-button").hidden = true; // the defaults of the page hold
  }
  changeModel();
}

function nameOf({ name, source: from, target: to }) {
  if (!from) return name;
  const isOnly = models.filter((one) => one.source === from && one.target === to).length === 1;
  return `${languageOf(from)} → ${languageOf(to)}${isOnly ? "" : ` (${name})`}`;
}

function changeModel() {
  const { name, source: from, target: to, runtime, precision, certified, problem, confirmed, reading } = model();
  remember("model", name);
  byId("source-label").textContent = from ? languageOf(from) : "Source";
  byId("target-label").textContent = to ? languageOf(to) : "Translation";
  source.lang = tagOf(from);
  byId("target").lang = tagOf(to);
  byId("swap").hidden = !reverse();
  const checks = [certified ? "parity checked" : "parity not checked", confirmed ? "reading confirmed" : "reading unconfirmed"];
  byId("about").textContent = [name, precision, runtime, ...checks].join(" · ");
  byId("about").title = [problem, `reading: ${reading}`].filter(Boolean).join("\n");
  translateNow();
}

function swap() {
  const text = entries.map(textOf).join("\n");
  byId("model").value = reverse().name;
  if (text.trim()) source.value = text;
  sourceChanged();
  changeModel();
  source.focus();
}

function sourceChanged() {
  const text = source.value;
  const lines = linesOf(text).filter((line) => line.trim()).length;
  const size = counted([...text].length, "character");
  byId("source-count").textContent = lines > 1 ? `${counted(lines, "line")}, ${size}` : text ? size : "";
  byId("clear").hidden = !text;
}

// The line of the cursor is that of the inspector.
function followCursor() {
  const line = linesOf(source.value.slice(0, source.selectionStart)).length - 1;
  if (line === active) return;
  active = line;
  draw();
}

// Keys and dialogs

function askForKey(message) {
  byId("key-button").hidden = false;
  if (byId("key").open) return;
  byId("key-text").textContent = apiKey() ? message : "This server asks for an API key. It is kept until you close the tab.";
  byId("key-input").value = "";
  byId("key").returnValue = "";
  byId("key").showModal();
}

function keyClosed() {
  if (byId("key").returnValue !== "use") return;
  setApiKey(byId("key-input").value.trim());
  tryAgain();
}

function pressed(event) {
  if (event.isComposing) return; // keys of an input method
  const isCommand = event.ctrlKey || event.metaKey;
  if (isCommand && event.key === "Enter") translateNow();
  else if (isCommand && event.key === "/") byId("help").showModal();
  else if (event.key === "Escape" && translator.isBusy && !document.querySelector("dialog[open]")) stop();
  else if (event.altKey && event.key === "ArrowUp") inspector.move(entries[activeLine()], -1);
  else if (event.altKey && event.key === "ArrowDown") inspector.move(entries[activeLine()], 1);
  else return;
  event.preventDefault();
}

function stop() {
  clearTimeout(timer);
  translator.stop();
  announce("Stopped.");
}

async function copy() {
  try {
    await navigator.clipboard.writeText(entries.map(textOf).join("\n"));
    byId("copy").textContent = "Copied";
  } catch {
    byId("copy").textContent = "Not allowed here"; // browsers allow it on https and on localhost
  }
  announce(byId("copy").textContent);
  setTimeout(() => (byId("copy").textContent = "Copy"), 2000);
}

function toggleOptions() {
  const isOpen = byId("options").hidden;
  byId("options").hidden = !isOpen;
  byId("options-button").setAttribute("aria-expanded", String(isOpen));
}

// The line that is looked into: the active one, or the nearest that is not empty and was translated.
function activeLine() {
  const line = Math.min(active, Math.max(entries.length - 1, 0));
  if (entries[line]) return line;
  return [nextLine(line, 1), nextLine(line, -1)].find((other) => other !== line) ?? line;
}

// The line above or below that is not empty; the same one where there is none.
function nextLine(from, by) {
  let line = from + by;
  while (line >= 0 && line < entries.length && !entries[line]) line += by;
  return entries[line] ? line : from;
}

function step(by) {
  active = nextLine(activeLine(), by);
  drawNow();
}

function onClick(id, action) {
  byId(id).addEventListener("click", action);
}

function start() {
  source.addEventListener("input", () => {
    sourceChanged();
    translateSoon();
  });
  for (const name of ["keyup", "click", "input"]) source.addEventListener(name, followCursor);
  document.addEventListener("keydown", pressed);
  byId("model").addEventListener("change", changeModel);
  byId("options").addEventListener("submit", (event) => event.preventDefault());
  byId("theme").value = document.documentElement.dataset.theme;
  byId("theme").addEventListener("change", (event) => rememberTheme(event.target.value));
  byId("key").addEventListener("close", keyClosed);
  onClick("banner-button", tryAgain);
  onClick("clear", () => {
    source.value = "";
    sourceChanged();
    translateNow();
    source.focus();
  });
  onClick("copy", copy);
  onClick("help-button", () => byId("help").showModal());
  onClick("key-button", () => byId("key").showModal());
  onClick("key-cancel", () => byId("key").close("cancel"));
  onClick("next-line", () => step(1));
  onClick("options-button", toggleOptions);
  onClick("previous-line", () => step(-1));
  onClick("reset-options", () => options.reset());
  onClick("stop", stop);
  onClick("swap", swap);
  byId("key-button").hidden = !apiKey();
  sourceChanged(); // a browser may have kept the text
  loadModels();
}

start();
