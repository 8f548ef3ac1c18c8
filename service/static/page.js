"use strict";

/* What a visitor does and what the service answers. results.js and classes.js draw it; the files share their names. */

const MODES = ["population", "sample", "expected"];
const TOP_K = 5;
const RETRIES = 2; // after an answer 429
const LONGEST_WAIT_S = 30;
const LARGE = 5e6; // bytes; a server that refuses a body may close the connection before its answer is read
const ABOUT_ANY_MODE = new Set([401, 404, 413, 415]); // no other mode would change these answers
const PATIENCE_MS = 2000; // after which the page says why an answer may take longer

const byId = (id) => document.getElementById(id);
const sectionOf = (mode) => document.querySelector(`.mode[data-mode="${mode}"]`);
const placesOf = (mode) => (mode === main ? [byId("answer"), sectionOf(mode)] : [sectionOf(mode)]);
const count = (number) => number.toLocaleString("en");
const address = (path) => new URL(path, document.baseURI).href;

let models = [];
let modelsRead = null; // the promise of the last attempt to list them
let image = null; // the file that was last dropped, chosen or pasted
let choices = 0; // images and samples chosen so far: a sample that arrives late yields to a newer one
let outcomes = {}; // of the last image, by mode: the answer or the failure
let key = ""; // held in memory only
let running = null; // the AbortController of the requests under way
let comparing = false;

let main = MODES[0]; // the mode of the answer: the chosen one

const chosenMode = () => document.querySelector('input[name="mode"]:checked').value;
const chosenModel = () => models.find((model) => model.name === byId("model").value);

/** An answer that is no result. `status` is 0 where the server was not reached. */
class Failure extends Error {
  constructor(message, status = 0, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
    this.aboutAnyMode = ABOUT_ANY_MODE.has(status);
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
      showProgress(mode, `The server is busy; trying again in ${Math.ceil(wait)} s.`);
      await sleep(wait, signal);
      showProgress(mode, "");
    }
  }
}

/** Ask in the chosen mode and, where the visitor compares, in the others, one after the other. */
async function run() {
  running?.abort();
  if (!image) return;
  const controller = new AbortController();
  running = controller;
  comparing = false;
  outcomes = {};
  MODES.forEach(showIdle);
  say("note", `Classifying ${image.name}…`);
  byId("comparison").textContent = "";
  try {
    await modelsRead;
    controller.signal.throwIfAborted();
    main = chosenMode();
    const unread = await unreadable(image);
    controller.signal.throwIfAborted();
    await ask(main, controller.signal, unread);
    sayAnswer(outcomes[main]);
    if (chosenModel()?.loaded === false) modelsRead = readModels(); // it is loaded now, or cannot be
    await compare(controller.signal);
  } catch (error) {
    if (!controller.signal.aborted) throw error; // otherwise a newer image or model has taken over
  }
}

/** Ask in the modes that have no answer yet; not side by side, so that the times compare. */
async function compare(signal) {
  if (!byId("compare").open || comparing) return;
  comparing = true;
  for (const mode of MODES.filter((one) => !(one in outcomes))) {
    const known = Object.values(outcomes).find((one) => one instanceof Failure && one.aboutAnyMode);
    await ask(mode, signal, known);
  }
  comparing = false;
  byId("comparison").textContent = summary(outcomes);
}

/** Put the answer in one mode, or the failure, into its place; `known` is a failure that needs no request. */
async function ask(mode, signal, known = null) {
  showWaiting(mode);
  const timer = setTimeout(() => showProgress(mode, slowBecause()), chosenModel()?.loaded === false ? 0 : PATIENCE_MS);
  try {
    if (known) throw known;
    const answer = await classify(mode, signal);
    signal.throwIfAborted();
    outcomes[mode] = answer;
    showAnswer(mode, answer);
  } catch (error) {
    if (!(error instanceof Failure) || signal.aborted) throw error;
    outcomes[mode] = error;
    showError(mode, error.message);
  } finally {
    clearTimeout(timer);
  }
}

function slowBecause() {
  return chosenModel()?.loaded === false
    ? "The service loads this model first. That takes some seconds, once."
    : "Still working. The first answer in a mode can take some seconds while the service prepares it.";
}

/** A folder, or a file that has gone since, fails like the network would: tell them apart. */
async function unreadable(file) {
  try {
    await file.slice(0, 1).arrayBuffer();
    return null;
  } catch {
    const failure = new Failure("This file could not be read. Choose an image file that is still in its place.");
    failure.aboutAnyMode = true;
    return failure;
  }
}

// ------------------------------------------------------------------------------------------------------- image

function size(bytes) {
  if (bytes < 1000) return `${bytes} bytes`;
  return bytes < 1e6 ? `${(bytes / 1e3).toFixed(0)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

function setImage(file) {
  choices += 1;
  image = file;
  const preview = byId("preview");
  URL.revokeObjectURL(preview.src);
  preview.src = URL.createObjectURL(file);
  preview.alt = `Preview of ${file.name}.`;
  byId("picture").hidden = false;
  byId("no-preview").hidden = true;
  byId("zone").classList.add("filled");
  byId("zone-title").textContent = "Choose another image";
  byId("formats").hidden = true;
  byId("caption").hidden = false;
  byId("caption").textContent = `${file.name} · ${size(file.size)}`;
  writeCommand();
  run();
}

/** Frame the central square of the image that the chosen model is given. */
function showFrame() {
  const { naturalWidth: width, naturalHeight: height } = byId("preview");
  const crop = chosenModel()?.crop;
  const side = crop * Math.min(width, height);
  const isPart = image !== null && side > 0 && side < Math.max(width, height);
  byId("frame").hidden = !isPart;
  byId("frame-note").hidden = !isPart || byId("picture").hidden;
  byId("frame").style.width = `${(100 * side) / width}%`;
  byId("frame").style.height = `${(100 * side) / height}%`;
}

/** Take the first of the files that a drop, a choice or a paste brought. */
function take(files, otherwise) {
  if (files.length > 0) setImage(files[0]);
  else say("error", otherwise);
}

async function trySample(name) {
  choices += 1;
  const mine = choices;
  try {
    const response = await fetch(address(`static/samples/${name}`));
    if (!response.ok) throw new Failure(`status ${response.status}`);
    const content = await response.blob();
    if (mine === choices) setImage(new File([content], name, { type: "image/jpeg" }));
  } catch {
    if (mine === choices) say("error", "This sample could not be read. Check that the server runs, then try again.");
  }
}

function listenForImages() {
  byId("file").addEventListener("change", () => {
    const files = [...byId("file").files];
    byId("file").value = ""; // so that choosing the same file again is a change
    if (files.length > 0) setImage(files[0]);
  });
  document.querySelectorAll(".sample").forEach((button) => {
    button.addEventListener("click", () => trySample(button.dataset.file));
  });
  byId("preview").addEventListener("load", (event) => {
    const { naturalWidth, naturalHeight } = event.target;
    byId("caption").textContent = `${image.name} · ${naturalWidth} × ${naturalHeight} · ${size(image.size)}`;
    showFrame();
  });
  byId("preview").addEventListener("error", () => {
    byId("picture").hidden = true;
    byId("frame-note").hidden = true;
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
    take(event.dataTransfer.files, "This is not a file. Save the image first, then drop its file.");
  });
  document.addEventListener("paste", (event) => {
    if (event.target.matches("input")) return; // text for a field
    take(event.clipboardData.files, "There is no image in the clipboard. Copy an image, then paste again.");
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
    if (preferred?.name === chosen) showModel();
    else showModelInItsMode();
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    byId("models-failed").hidden = error.status === 401; // the field for the key says what to do
    byId("models-error").textContent = `The models could not be listed. ${error.message}`;
  }
}

function showModelInItsMode() {
  const own = MODES.find((mode) => mode === chosenModel()?.default_statistics);
  if (own) document.querySelector(`input[name="mode"][value="${own}"]`).checked = true;
  showModel();
}

function showModel() {
  const model = chosenModel();
  const classes = model?.num_classes ? `${count(model.num_classes)} classes` : "classes";
  byId("classes-title").textContent = `The ${classes} that this model knows`;
  if (model) {
    const facts = [];
    if (model.architecture) facts.push(model.architecture);
    if (model.num_classes) facts.push(classes);
    if (model.default_statistics) facts.push(`default mode: ${model.default_statistics}`);
    if (model.revision) facts.push(`revision ${model.revision}`);
    if (!model.loaded) facts.push("not loaded yet: its first answer takes some seconds longer");
    byId("model-facts").textContent = facts.join(" · ");
  }
  for (const mode of MODES) sectionOf(mode).querySelector(".measured").textContent = accuracy(model, mode);
  showMode();
  showFrame();
  showClasses();
}

/** The accuracy of a model in a mode, with the images that it was measured on. */
function accuracy(model, mode) {
  const top1 = model?.accuracy?.[mode]?.top1;
  if (!Number.isFinite(top1)) return "";
  const where = model.measured_on ? ` on ${model.measured_on}, not on the test images of its data set` : "";
  return `top-1 accuracy ${top1.toFixed(1)} %${where}`;
}

/** Say what the chosen mode does. */
function showMode() {
  byId("mode-about").textContent = sectionOf(chosenMode()).querySelector(".explanation").textContent;
  byId("mode-measured").textContent = accuracy(chosenModel(), chosenMode());
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
  const fields = [`image=@${formFile(image?.name ?? "image.jpg")}`];
  if (byId("model").value) fields.push(`model=${byId("model").value}`);
  fields.push(`statistics=${chosenMode()}`, `top_k=${TOP_K}`);
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
  showModelInItsMode();
  run();
});
byId("models-retry").addEventListener("click", () => {
  modelsRead = readModels();
});
byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  byId("key-note").textContent = "The key is kept until this page is closed or reloaded.";
  modelsRead = readModels();
  await run();
});
byId("compare").addEventListener("toggle", async () => {
  if (!(main in outcomes)) return; // otherwise `run` compares once it has the first answer
  const { signal } = running;
  try {
    await compare(signal);
  } catch (error) {
    if (!signal.aborted) throw error;
  }
});
byId("classes").addEventListener("toggle", showClasses);
byId("search").addEventListener("input", filterClasses);
document.querySelectorAll('input[name="mode"]').forEach((radio) => {
  radio.addEventListener("change", () => {
    showMode();
    run();
  });
});
byId("copy").addEventListener("click", copyCommand);
showMode();
modelsRead = readModels();
