"use strict";

const MODES = ["population", "sample", "expected"];
const TOP_K = 5;
const RETRIES = 2; // after an answer 429
const LONGEST_WAIT_S = 30;
const LARGE = 5e6; // bytes; a server that refuses a body may close the connection before its answer is read
const ABOUT_ANY_MODE = new Set([401, 404, 413, 415]); // no other statistics would change these answers

const byId = (id) => document.getElementById(id);
const sectionOf = (mode) => document.querySelector(`.mode[data-mode="${mode}"]`);
const address = (path) => new URL(path, document.baseURI).href;

let models = [];
let image = null; // the file that was last dropped, chosen or pasted
let key = ""; // held in memory only
let running = null; // the AbortController of the requests under way

/** An answer that is no result. `status` is 0 where the server was not reached. */
class Failure extends Error {
  constructor(message, status = 0, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

// ---------------------------------------------------------------------------------------------------- requests

async function request(path, options = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  let response;
  let body = null;
  try {
    response = await fetch(address(path), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server could not be reached. Check that it runs and that you are online, then try again.");
  }
  try {
    body = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
  }
  if (response.ok && body !== null) return body;
  const message = body?.error?.message ?? `The server sent no usable answer (status ${response.status}).`;
  if (response.status === 401) askForKey();
  throw new Failure(String(message), response.status, response.headers.get("Retry-After"));
}

function askForKey() {
  byId("key-form").hidden = false;
  byId("key-note").textContent = key
    ? "The server did not accept this key."
    : "The server asks for a key. It is kept until this page is closed or reloaded.";
  writeCommand();
}

/** Seconds to wait, from a Retry-After header that is a number or a date. */
function secondsToWait(header) {
  const seconds = header === null || header.trim() === "" ? 1 : Number(header);
  const wait = Number.isNaN(seconds) ? (Date.parse(header) - Date.now()) / 1000 : seconds;
  return Number.isNaN(wait) ? 1 : Math.min(Math.max(wait, 0.1), LONGEST_WAIT_S);
}

function sleep(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, seconds * 1000);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}

async function classify(mode, signal) {
  const form = new FormData();
  form.append("image", image, image.name);
  if (byId("model").value) form.append("model", byId("model").value);
  form.append("statistics", mode);
  form.append("top_k", String(TOP_K));
  for (let retry = 0; ; retry += 1) {
    const start = performance.now();
    try {
      const answer = await request("v1/classify", { method: "POST", body: form, signal });
      return { ...answer, roundTrip: performance.now() - start };
    } catch (error) {
      if (error.status === 0 && image.size > LARGE) error.message += ` It may not take ${size(image.size)} at once.`;
      if (error.status !== 429 || retry === RETRIES) throw error;
      const wait = secondsToWait(error.retryAfter);
      showNote(mode, `The server is busy; trying again in ${Math.ceil(wait)} s.`);
      await sleep(wait, signal);
      showNote(mode, "");
    }
  }
}

/** Ask for the three modes, one after the other, so that none waits for its siblings and the latencies compare. */
async function run() {
  running?.abort();
  if (!image) return;
  const controller = new AbortController();
  running = controller;
  const outcomes = {};
  MODES.forEach(showWaiting);
  say(`Classifying ${image.name}…`);
  try {
    let forAll = await unreadable(image);
    for (const mode of MODES) {
      controller.signal.throwIfAborted();
      try {
        if (forAll) throw forAll;
        outcomes[mode] = await classify(mode, controller.signal);
        controller.signal.throwIfAborted();
        showAnswer(mode, outcomes[mode]);
      } catch (error) {
        if (!(error instanceof Failure)) throw error;
        if (ABOUT_ANY_MODE.has(error.status)) forAll = error;
        outcomes[mode] = error;
        showError(mode, error.message);
      }
    }
    say(summary(outcomes));
  } catch (error) {
    if (!controller.signal.aborted) throw error; // otherwise a newer image or model has taken over
  }
}

/** A folder, or a file that has gone since, fails like the network would: tell them apart. */
async function unreadable(file) {
  try {
    await file.slice(0, 1).arrayBuffer();
    return null;
  } catch {
    return new Failure("This file could not be read. Choose an image file that is still in its place.");
  }
}

// ----------------------------------------------------------------------------------------------------- results

function element(tag, className, text = "") {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text; // labels come from a checkpoint: never as HTML
  return node;
}

const percent = (score) => (score > 0 && score < 0.0005 ? "< 0.1 %" : `${(100 * score).toFixed(1)} %`);
const milliseconds = (value) => (Number.isFinite(value) ? `${value.toFixed(value < 100 ? 1 : 0)} ms` : "– ms");

function bar(prediction) {
  const item = element("li", "bar");
  const text = element("div", "bar-text");
  const label = element("span", "bar-label", prediction.label);
  label.title = prediction.label;
  text.append(label, element("span", "bar-score", percent(prediction.score)));
  const track = element("div", "bar-track");
  const fill = element("div", "bar-fill");
  fill.style.width = `${Math.min(Math.max(100 * prediction.score, 0), 100)}%`;
  track.append(fill);
  track.setAttribute("aria-hidden", "true");
  item.append(text, track);
  return item;
}

function blankBar() {
  const item = element("li", "bar");
  item.append(element("div", "bar-blank"), element("div", "bar-track"));
  item.setAttribute("aria-hidden", "true");
  return item;
}

function show(mode, state, bars, errorText) {
  const section = sectionOf(mode);
  section.dataset.state = state;
  section.setAttribute("aria-busy", String(state === "waiting"));
  section.querySelector(".bars").replaceChildren(...bars);
  section.querySelector(".bars").hidden = bars.length === 0;
  section.querySelector(".error").textContent = errorText;
  section.querySelector(".error").hidden = errorText === "";
  section.querySelector(".latency").textContent = "";
  section.querySelector(".timing").textContent = "";
}

const blanks = () => Array.from({ length: TOP_K }, blankBar);
const showIdle = (mode) => show(mode, "idle", blanks(), "");
const showWaiting = (mode) => show(mode, "waiting", blanks(), "");
const showError = (mode, message) => show(mode, "error", [], message);

function showNote(mode, text) {
  sectionOf(mode).querySelector(".timing").textContent = text;
}

function showAnswer(mode, answer) {
  show(mode, "done", answer.predictions.map(bar), "");
  const { queue, inference } = answer.timing_ms ?? {};
  sectionOf(mode).querySelector(".latency").textContent = milliseconds(inference);
  showNote(mode, `queue ${milliseconds(queue)} · round trip ${milliseconds(answer.roundTrip)}`);
}

/** One sentence over the three results; also what a screen reader announces. */
function summary(outcomes) {
  const failed = MODES.filter((mode) => outcomes[mode] instanceof Failure);
  const answered = MODES.filter((mode) => !failed.includes(mode));
  const failures = [...new Set(failed.map((mode) => outcomes[mode].message))].join(" ");
  if (answered.length === 0) return failures;
  const names = answered.map((mode) => outcomes[mode].predictions[0].label.split(",")[0]); // the first of its synonyms
  const each = answered.map((mode, place) => `${mode} says ${names[place]}`).join(", ");
  if (failed.length > 0) return `${each}; no answer from ${failed.join(" and ")}. ${failures}`;
  return new Set(names).size > 1 ? `The modes differ: ${each}.` : `All three modes say ${names[0]}.`;
}

function say(text) {
  byId("status").textContent = text;
}

// ------------------------------------------------------------------------------------------------------- image

function size(bytes) {
  if (bytes < 1000) return `${bytes} bytes`;
  return bytes < 1e6 ? `${(bytes / 1e3).toFixed(0)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

function setImage(file) {
  image = file;
  const preview = byId("preview");
  URL.revokeObjectURL(preview.src);
  preview.src = URL.createObjectURL(file);
  preview.alt = `Preview of ${file.name}.`;
  preview.hidden = false;
  byId("no-preview").hidden = true;
  byId("zone").classList.add("filled");
  byId("zone-title").textContent = "Choose another image";
  byId("formats").hidden = true;
  byId("caption").hidden = false;
  byId("caption").textContent = `${file.name} · ${size(file.size)}`;
  writeCommand();
  run();
}

/** Take the first of the files that a drop, a choice or a paste brought. */
function take(files, otherwise) {
  if (files.length > 0) setImage(files[0]);
  else say(otherwise);
}

function listenForImages() {
  byId("file").addEventListener("change", () => {
    const files = [...byId("file").files];
    byId("file").value = ""; // so that choosing the same file again is a change
    if (files.length > 0) setImage(files[0]);
  });
  byId("preview").addEventListener("load", (event) => {
    const { naturalWidth, naturalHeight } = event.target;
    byId("caption").textContent = `${image.name} · ${naturalWidth} × ${naturalHeight} · ${size(image.size)}`;
  });
  byId("preview").addEventListener("error", () => {
    byId("preview").hidden = true;
    byId("no-preview").hidden = false;
  });
  // The whole page takes a drop, since a near miss would otherwise make the browser leave for the file.
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    byId("zone").classList.add("over");
  });
  document.addEventListener("dragleave", (event) => {
    if (event.relatedTarget === null) byId("zone").classList.remove("over");
  });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    byId("zone").classList.remove("over");
    take(event.dataTransfer.files, "What was dropped is no file. Save the image first, then drop its file.");
  });
  document.addEventListener("paste", (event) => {
    if (event.target === byId("key")) return;
    take(event.clipboardData.files, "The clipboard holds no image. Copy an image, then paste again.");
  });
}

// ------------------------------------------------------------------------------------------------------ models

async function readModels() {
  const chosen = byId("model").value;
  byId("models-failed").hidden = true;
  try {
    const answer = await request("v1/models");
    models = answer.models;
    byId("model").replaceChildren(...models.map((model) => new Option(model.name, model.name)));
    byId("model").disabled = models.length === 0;
    const preferred = models.find((model) => model.name === chosen) ?? models.find((model) => model.default);
    if (preferred) byId("model").value = preferred.name;
    showModel();
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    byId("models-failed").hidden = error.status === 401; // the field for the key says what to do
    byId("models-error").textContent = `The models could not be listed. ${error.message}`;
  }
}

function showModel() {
  const model = models.find((one) => one.name === byId("model").value);
  if (model) {
    const facts = [];
    if (model.architecture) facts.push(model.architecture);
    if (model.num_classes) facts.push(`${model.num_classes} classes`);
    if (model.default_statistics) facts.push(`default statistics: ${model.default_statistics}`);
    if (model.revision) facts.push(`revision ${model.revision}`);
    if (!model.loaded) facts.push("loads on first use");
    byId("model-facts").textContent = facts.join(" · ");
    const radios = [...document.querySelectorAll('input[name="command-mode"]')];
    const preferred = radios.find((radio) => radio.value === model.default_statistics);
    if (preferred) preferred.checked = true;
  }
  for (const mode of MODES) {
    const top1 = model?.accuracy?.[mode]?.top1;
    const text = Number.isFinite(top1) ? `top-1 accuracy ${top1.toFixed(1)} %` : "";
    sectionOf(mode).querySelector(".measured").textContent = text;
  }
  writeCommand();
}

// ----------------------------------------------------------------------------------------------------- command

/** One shell word. */
function word(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

/** A file's name as the value of curl's -F: quoted where curl would read on, and never a control character. */
function formFile(name) {
  const safe = name.replace(/\p{Cc}/gu, "_").replace(/^-/, "./-");
  return /[",;\\]/.test(safe) ? `"${safe.replace(/["\\]/g, "\\$&")}"` : safe;
}

function writeCommand() {
  const mode = document.querySelector('input[name="command-mode"]:checked').value;
  const fields = [`image=@${formFile(image?.name ?? "image.jpg")}`];
  if (byId("model").value) fields.push(`model=${byId("model").value}`);
  fields.push(`statistics=${mode}`, `top_k=${TOP_K}`);
  const [file, ...rest] = fields.map((field) => `-F ${word(field)}`);
  const lines = [`curl ${file}`, rest.join(" "), word(address("v1/classify"))];
  if (!byId("key-form").hidden) lines.splice(1, 0, "-H 'Authorization: Bearer YOUR_KEY'");
  byId("command").textContent = lines.join(" \\\n  ");
}

async function copyCommand() {
  const button = byId("copy");
  let done = true;
  try {
    await navigator.clipboard.writeText(byId("command").textContent);
  } catch {
    // Browsers offer the clipboard to https and localhost only; elsewhere the selection can still be copied.
    getSelection().selectAllChildren(byId("command"));
    done = document.execCommand("copy");
  }
  button.textContent = done ? "Copied" : "Press Ctrl+C";
  byId("copied").textContent = done ? "The command was copied." : "The command is selected: press Control and C.";
  setTimeout(() => {
    button.textContent = "Copy";
    byId("copied").textContent = "";
  }, 2000);
}

// -------------------------------------------------------------------------------------------------------- start

MODES.forEach(showIdle);
listenForImages();
byId("model").addEventListener("change", () => {
  showModel();
  run();
});
byId("models-retry").addEventListener("click", readModels);
byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  byId("key-note").textContent = "The key is kept until this page is closed or reloaded.";
  await readModels();
  await run();
});
document.querySelectorAll('input[name="command-mode"]').forEach((radio) => {
  radio.addEventListener("change", writeCommand);
});
byId("copy").addEventListener("click", copyCommand);
writeCommand();
readModels();
