"use strict";

/* The list of classes that the chosen model knows, and the search in it. */

const MOST_LISTED = 1000; // classes at once

let labels = { model: null, names: [] };

/** Read the names of the chosen model's classes, once somebody looks at them. */
async function showClasses() {
  if (!byId("classes").open) return;
  const model = byId("model").value;
  if (labels.model !== model || labels.names.length === 0) {
    labels = { model, names: [] };
    byId("class-list").hidden = true;
    byId("class-count").textContent = "Reading the list…";
    try {
      const answer = await request(model ? `v1/labels?model=${encodeURIComponent(model)}` : "v1/labels");
      if (byId("model").value !== model) return; // another was chosen meanwhile
      labels.names = answer.labels;
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      byId("class-count").textContent = `The classes could not be listed. ${error.message}`;
      return;
    }
  }
  filterClasses();
}

/** List the classes whose names contain every word of the search. */
function filterClasses() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = labels.names.filter((name) => words.every((one) => name.toLowerCase().includes(one)));
  byId("class-list").replaceChildren(...found.slice(0, MOST_LISTED).map((name) => element("li", "", name)));
  byId("class-list").hidden = found.length === 0;
  byId("class-count").textContent = countClasses(found.length, labels.names.length);
}

function countClasses(found, all) {
  if (all === 0) return "The names of the classes are not known, or not before the model is loaded.";
  if (found === 0) return `None of the ${count(all)} classes matches. Try another word.`;
  const rest = found > MOST_LISTED ? `, the first ${count(MOST_LISTED)} listed` : "";
  return found === all ? `${count(all)} classes${rest}` : `${count(found)} of ${count(all)} classes${rest}`;
}
