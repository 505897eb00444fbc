"use strict";
/* The completions of a step: by prompt, sorted and filtered. */

/* Sort keys of completions, least value first. */
const SORTS = {
  prompt: ["by prompt", () => 0],
  worst: ["worst reward first", (row) => row.reward ?? Infinity],
  best: ["best reward first", (row) => -(row.reward ?? -Infinity)],
  longest: ["longest first", (row) => -lengthOf(row)],
  shortest: ["shortest first", lengthOf],
  advantage: ["largest |advantage| first", (row) => -Math.abs(row.advantage ?? 0)],
  gap: ["largest log-probability gap first", (row) => -(row.logprob_gap ?? 0)],
  entropy: ["largest entropy first", (row) => -(row.entropy ?? 0)],
};
const MOST_ROWS = 500;
const FILTERS = [
  "sort", "finish", "min-reward", "max-reward", "min-length", "max-length", "failed", "stale", "search",
];

const isStale = (row) => row.policy_version < row.step - 1;
const groupKey = (row) => `${row.set ?? ""}/${row.prompt_index ?? row.prompt}`;

/* Length in tokens, or in characters if a row has no number of tokens. */
function lengthOf(row) {
  return row.num_tokens ?? row.completion.length;
}

function numberIn(id) {
  const text = byId(id).value;
  return text === "" ? null : Number(text);
}

/* Step with the rows of the completions of `step`: a repeated pass has none of its own. */
function stepOfCompletions(step) {
  const { steps_per_generation: size = 1, num_iterations: iterations = 1 } =
    state.runs[state.run].config.grpo ?? {};
  const iteration = Math.floor((Math.max(step - 1, 0) % (size * iterations)) / size);
  return step - iteration * size;
}

/* Step of the newest evaluation at `step`. */
function stepOfEvaluation(step) {
  const evaluated = state.runs[state.run].records.filter(isEvaluated).map((record) => record.step);
  return evaluated.findLast((each) => each <= step) ?? step;
}

/* Read the completions of the selected step, and show them. */
async function loadCompletions() {
  const wanted = () => [state.run, state.step, byId("kind").value];
  const [run, ofStep, kind] = wanted();
  const isTraining = kind === "completions";
  const step = isTraining ? stepOfCompletions(ofStep) : stepOfEvaluation(ofStep);
  const rows = await source.rows(run, kind, step);
  const shown = { ...(await withTokens(kind, ofStep)), rows, rowsStep: step };
  if (wanted().join() !== [run, ofStep, kind].join()) return;  // another was selected meanwhile
  state.shown = shown;
  const reasons = [...new Set(rows.map((row) => row.finish_reason))].sort();
  const chosen = byId("finish").value;
  byId("finish").replaceChildren(h("option", { value: "" }, "any finish"),
    ...reasons.map((reason) => h("option", { value: reason, selected: reason === chosen }, reason)));
  byId("found-steps").replaceChildren();
  await showList();
}

function passesFilters(row) {
  const [least, most] = [numberIn("min-reward"), numberIn("max-reward")];
  const text = byId("search").value.toLowerCase();
  const isReward = (least === null && most === null) ||
    (row.reward !== null && row.reward >= (least ?? -Infinity) && row.reward <= (most ?? Infinity));
  return isReward
    && lengthOf(row) >= (numberIn("min-length") ?? 0)
    && lengthOf(row) <= (numberIn("max-length") ?? Infinity)
    && (!byId("finish").value || row.finish_reason === byId("finish").value)
    && (!byId("failed").checked || row.reward === null)
    && (!byId("stale").checked || isStale(row))
    && (row.completion.toLowerCase().includes(text) || row.prompt.toLowerCase().includes(text));
}

/* Show the rows that pass the filters, and open the first if the open one is filtered out. */
async function showList() {
  const { rows } = state.shown;
  const key = SORTS[byId("sort").value][1];
  const found = rows.filter(passesFilters).sort((a, b) => key(a) - key(b));
  const groups = Map.groupBy(found.slice(0, MOST_ROWS), groupKey);
  byId("list").replaceChildren(...[...groups.values()].map(groupElement));
  byId("count").textContent = countText(found.length, rows.length);
  state.listed = [...groups.values()].flat();
  const first = state.listed.includes(state.row) ? state.row : state.listed[0];
  if (first) await read(first);
  else {
    state.row = null;
    byId("pane").replaceChildren();
    byId("other-pane").hidden = true;
  }
}

function countText(numFound, numRows) {
  const { step, rowsStep, kind } = state.shown;
  const held = source.heldSteps(state.run, kind);
  if (!numRows) return `step ${rowsStep} has no completions${held ? `: ${held}` : ""}`;
  const limit = numFound > MOST_ROWS ? `, the first ${MOST_ROWS} are listed` : "";
  const from = rowsStep === step ? "" : ` of step ${rowsStep}`;
  return `${numFound} of ${numRows}${from}${limit}${held ? `; ${held}` : ""}`;
}

function groupElement(rows) {
  const all = groupOf(rows[0], state.shown.rows);
  const scores = all.map((row) => row.reward).filter((reward) => reward !== null);
  const mean = scores.length ? short(scores.reduce((a, b) => a + b) / scores.length, 3) : "–";
  const few = rows.length < all.length ? `${rows.length} of ${all.length}` : `${all.length}`;
  return h("section", { className: "group" },
    h("h3", { title: rows[0].prompt }, h("b", {}, titleOf(rows[0])), h("span", {}, `mean ${mean}, ${few}`),
      h("q", {}, rows[0].prompt.trim().slice(-120))),
    ...rows.map(rowElement));
}

function rowElement(row) {
  const badges = [
    row.reward === null && "failed", isStale(row) && "stale",
    hasTokens(state.shown, row) && "tokens",
  ].filter(Boolean).map((text) => h("i", { className: `badge ${text}` }, text));
  const element = h("div", { className: "row", onclick: () => choose(row) },
    h("b", { className: "reward" }, short(row.reward, 3)),
    h("span", { className: "length" }, row.num_tokens === undefined ? "" : `${row.num_tokens} token${row.num_tokens === 1 ? "" : "s"}`),
    h("span", {}, row.finish_reason), ...badges,
    h("span", { className: "snippet" }, row.completion.slice(0, 200)));
  element.row = row;
  return element;
}

function markSelected() {
  for (const element of document.querySelectorAll("#list .row")) {
    element.classList.toggle("selected", element.row === state.row);
  }
}

/* Open the completion before or behind the open one. */
function readNext(direction) {
  const next = state.listed[state.listed.indexOf(state.row) + direction];
  if (!next) return;
  choose(next);
  document.querySelector("#list .row.selected").scrollIntoView({ block: "nearest" });
}
