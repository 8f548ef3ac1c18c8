"use strict";

/* How answers, failures and progress look; page.js, which is loaded next, says when. */

function element(tag, className, text = "") {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text; // labels come from a checkpoint: never as HTML
  return node;
}

const percent = (score) => (score > 0 && score < 0.0005 ? "< 0.1\u00a0%" : `${(100 * score).toFixed(1)}\u00a0%`);
const digits = (value) => (Number.isFinite(value) ? value.toFixed(value < 100 ? 1 : 0) : "–");
const milliseconds = (value) => `${digits(value)}\u00a0ms`;

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
  for (const section of placesOf(mode)) {
    section.dataset.state = state;
    section.setAttribute("aria-busy", String(state === "waiting"));
    section.querySelector(".bars").replaceChildren(...bars());
    section.querySelector(".bars").hidden = section.querySelector(".bars").childElementCount === 0;
  }
  sectionOf(mode).querySelector(".error").textContent = errorText;
  sectionOf(mode).querySelector(".error").hidden = errorText === "";
  showNote(mode, "");
}

const blanks = () => Array.from({ length: TOP_K }, blankBar);
const nothing = () => [];
const showIdle = (mode) => show(mode, "idle", nothing, "");
const showWaiting = (mode) => show(mode, "waiting", blanks, "");
const showError = (mode, message) => show(mode, "error", nothing, message);

function showNote(mode, text) {
  for (const section of placesOf(mode)) section.querySelector(".timing").textContent = text;
}

function showProgress(mode, text) {
  if (mode === main) say("note", text || `Classifying ${image.name}…`);
  sectionOf(mode).querySelector(".timing").textContent = text;
}

function showAnswer(mode, answer) {
  show(mode, "done", () => answer.predictions.map(bar), "");
  const { queue, inference } = answer.timing_ms ?? {};
  const times = `network ${milliseconds(inference)} · queue ${milliseconds(queue)}`;
  showNote(mode, `${times} · round trip ${milliseconds(answer.roundTrip)}`);
}

const shortLabel = (prediction) => prediction.label.split(",")[0]; // the first of its synonyms
const NEAR = 0.1; // two probabilities that differ by less are nearly a tie

function sayAnswer(outcome) {
  if (outcome instanceof Failure) {
    say("error", outcome.message);
    return;
  }
  const [first, second] = outcome.predictions;
  const classes = chosenModel()?.num_classes ? `${count(chosenModel().num_classes)} classes` : "classes";
  if (outcome.uncertain) say("uncertain", `The model is uncertain: the picture may show none of its ${classes}.`);
  else if (second && first.score - second.score < NEAR) say("tie", "Nearly a tie: the first two are about equally likely.");
  else say("answer", `${shortLabel(first)}, ${percent(first.score)}`);
  byId("answer").scrollIntoView({ block: "nearest" });
}

/** One sentence on the three results; also what a screen reader announces. */
function summary(outcomes) {
  const failed = MODES.filter((mode) => outcomes[mode] instanceof Failure);
  const answered = MODES.filter((mode) => !failed.includes(mode));
  const failures = [...new Set(failed.map((mode) => outcomes[mode].message))].join(" ");
  if (answered.length === 0) return failures;
  const names = answered.map((mode) => shortLabel(outcomes[mode].predictions[0]));
  const each = answered.map((mode, place) => `${mode} says ${names[place]}`).join(", ");
  if (failed.length > 0) return `${each}; no answer from ${failed.join(" and ")}. ${failures}`;
  return new Set(names).size > 1 ? `The modes differ: ${each}.` : `All three modes say ${names[0]}.`;
}

/** Show and announce a note, a tie, doubt or an error. A clear answer is only announced, since its bar shows it. */
function say(kind, text) {
  byId("answer").dataset.kind = kind;
  byId("status").textContent = text;
}
