"use strict";
/* The completions of a step, or those found in all steps: by prompt, sorted and filtered. */

/* Orders of completions: label, field, and -1 for the largest first. Equal ones stay as they are logged. */
const SORTS = {
  prompt: ["in their order", "", 1],
  worst: ["worst reward first", "reward", 1],
  best: ["best reward first", "reward", -1],
  longest: ["longest first", "num_tokens", -1],
  shortest: ["shortest first", "num_tokens", 1],
  advantage: ["largest advantage first", "advantage", -1],
  gap: ["largest log-probability gap first", "logprob_gap", -1],
  entropy: ["largest entropy first", "entropy", -1],
};
const REWARDS = "rewards/";  // begins the field of one reward function
let sorts = SORTS;  // with those of the shown completions' reward functions
const MOST_ROWS = 500;
const QUERY = ["sort", "min-reward", "search"];  // what a search in all steps asks for
const FILTERS = [...QUERY, "finish", "max-reward", "min-length", "max-length", "failed", "stale"];

const isStale = (row) => row.policy_version < row.step - 1;
const groupKey = (row) => `${row.set ?? ""}/${row.prompt_index ?? row.prompt}`;

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

/* Read the completions of the selected step, or the best of all steps in the chosen order, and show
   them. */
async function loadCompletions() {
  const isAll = byId("all-steps").checked;
  const wanted = () => [state.run, byId("kind").value,
    ...(byId("all-steps").checked ? QUERY.map((id) => byId(id).value) : [state.step])].join("/");
  const query = wanted(), [run, kind] = [state.run, byId("kind").value];
  if (isAll && state.shown.query === query) return;  // a new step, which may wait for the next search
  const shown = isAll ? { kind, query, rows: await findRows(run, kind), tokenKeys: new Set() }
    : await completionsOf(run, kind, state.step);
  if (wanted() !== query) return;  // another was selected meanwhile
  state.shown = shown;
  state.row = null;
  const { rows } = shown;
  offerSorts(rows);
  const reasons = [...new Set(rows.map((row) => row.finish_reason))].sort();
  const chosen = byId("finish").value;
  byId("finish").replaceChildren(h("option", { value: "" }, "any finish"),
    ...reasons.map((reason) => h("option", { value: reason, selected: reason === chosen }, reason)));
  byId("found-steps").replaceChildren();
  await showList();
}

/* Offer two more orders for each of several reward functions. */
function offerSorts(rows) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.rewards ?? {})))];
  const ofFunctions = (names.length > 1 ? names : []).flatMap((name) => [
    [`worst/${name}`, [`worst ${name} first`, REWARDS + name, 1]],
    [`best/${name}`, [`best ${name} first`, REWARDS + name, -1]]]);
  const chosen = byId("sort").value;
  sorts = { ...SORTS, ...Object.fromEntries(ofFunctions) };
  fillSelect("sort", Object.entries(sorts).map(([name, [label]]) => [name, label]));
  byId("sort").value = chosen in sorts ? chosen : "prompt";
}

const valueOf = (row, field) =>
  (field.startsWith(REWARDS) ? row.rewards?.[field.slice(REWARDS.length)] : row[field]) ?? null;

function findRows(run, kind) {
  const [, field, sign] = sorts[byId("sort").value];
  return source.found(run, kind, field, sign, byId("search").value, numberIn("min-reward") ?? -Infinity);
}

async function completionsOf(run, kind, ofStep) {
  const step = kind === "completions" ? stepOfCompletions(ofStep) : stepOfEvaluation(ofStep);
  const rows = await source.rows(run, kind, step);
  return { ...(await withTokens(run, kind, ofStep)), rows, rowsStep: step };
}

function passesFilters(row) {
  const [least, most] = [numberIn("min-reward"), numberIn("max-reward")];
  const text = byId("search").value.toLowerCase();
  const isReward = (least === null && most === null) ||
    (row.reward !== null && row.reward >= (least ?? -Infinity) && row.reward <= (most ?? Infinity));
  return isReward
    && (row.num_tokens ?? 0) >= (numberIn("min-length") ?? 0)
    && (row.num_tokens ?? 0) <= (numberIn("max-length") ?? Infinity)
    && (!byId("finish").value || row.finish_reason === byId("finish").value)
    && (!byId("failed").checked || row.reward === null)
    && (!byId("stale").checked || isStale(row))
    && (row.completion.toLowerCase().includes(text) || row.prompt.toLowerCase().includes(text));
}

function foundRows() {
  const [, field, sign] = sorts[byId("sort").value];
  const key = (row) => valueOf(row, field) === null ? Number.MAX_VALUE : sign * valueOf(row, field);
  return state.shown.rows.filter(passesFilters).sort((a, b) => key(a) - key(b));
}

/* Show the rows that pass the filters, and open the first if the open one is filtered out. */
async function showList() {
  const found = foundRows(), { rows } = state.shown;
  const groups = Map.groupBy(found.slice(0, MOST_ROWS), (row) => `${row.step}/${groupKey(row)}`);
  byId("list").replaceChildren(...[...groups.values()].map(groupElement));
  byId("count").textContent = countText(found.length, rows.length);
  drawSpread(found);
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
  const { step, rowsStep, kind, query } = state.shown;
  const held = source.heldSteps(state.run, kind);
  if (query !== undefined) return `${numRows < MOST_ROWS ? "" : "the first "}${numFound} in all steps${held ? `; ${held}` : ""}`;
  if (!numRows) return `step ${rowsStep} has no completions${held ? `: ${held}` : ""}`;
  const limit = numFound > MOST_ROWS ? `, the first ${MOST_ROWS} are listed` : "";
  const from = rowsStep === step ? "" : ` of step ${rowsStep}`;
  return `${numFound} of ${numRows}${from}${limit}${held ? `; ${held}` : ""}`;
}

function groupElement(rows) {
  const all = groupOf(rows[0], state.shown.rows);
  const scores = all.map((row) => row.reward).filter((reward) => reward !== null);
  const few = rows.length < all.length ? `${rows.length} of ${all.length}` : `${all.length}`;
  const title = state.shown.query === undefined
    ? `mean ${scores.length ? short(mean(scores), 3) : "–"}, ${few}` : `step ${rows[0].step}`;
  return h("section", { className: "group" },
    h("h3", { title: rows[0].prompt }, h("b", {}, titleOf(rows[0])), h("span", {}, title),
      h("q", {}, questionOf(rows[0]))),
    ...rows.map(rowElement));
}

/* What the user asked last; without a chat template, the prompt. */
function questionOf(row) {
  return row.messages?.findLast((message) => message.role === "user")?.content ?? row.prompt;
}

/* Histograms of the listed completions. */
function drawSpread(rows) {
  const figures = { reward: "reward", num_tokens: "length (tokens)" };
  const there = byId("spread");
  if (!there.children.length) {
    there.append(...Object.entries(figures).map(([field, label]) =>
      h("figure", { "data-field": field }, h("figcaption", {}, label), h("div", { className: "plot" }))));
  }
  for (const { dataset, lastChild } of there.children) {
    const x = rows.map((row) => row[dataset.field] ?? null).filter((value) => value !== null);
    const layout = plotLayout();
    Plotly.react(lastChild, [{ type: "histogram", x, marker: { color: cssColour("--accent") } }],
      { ...layout, bargap: 0.05, hovermode: "closest", uirevision: NaN, xaxis: { ...layout.xaxis, tickformat: "" } },
      PLOT_OPTIONS);
  }
}

/* Save the listed completions as they are logged. */
function download() {
  const lines = foundRows().map((row) => `${JSON.stringify(row)}\n`);
  const url = URL.createObjectURL(new Blob(lines, { type: "application/jsonl" }));
  h("a", { href: url, download: `${state.runs[state.run].name.split("/").pop()}.jsonl` }).click();
  URL.revokeObjectURL(url);
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
