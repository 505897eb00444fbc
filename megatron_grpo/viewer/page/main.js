"use strict";
/* The state of the page, what its controls do, and how it follows a run. */

const state = {
  runs: [],  // name, config, records in ascending step, offset of the last of them
  run: 0,  // whose completions are shown
  step: null,
  shown: { kind: "completions", step: null, rows: [], rowsStep: null, tokenKeys: new Set() },
  listed: [],  // the rows in the list, as they stand there
  row: null,  // the one that is read
};
const SECONDS_BETWEEN_POLLS = 2;

async function start() {
  const runs = await source.runs();
  source.opened = openedOf(runs);
  drawRuns(runs);
  const names = source.opened.map((number) => runs[number].name);
  state.runs = await Promise.all(names.map(async (name, run) =>
    ({ name, config: await source.config(run), records: [], offset: 0 })));
  fillSelect("run", Object.entries(names));
  fillSelect("other-run", Object.entries(names));
  for (const id of ["run", "other-run"]) byId(id).hidden = names.length === 1;
  byId("following").hidden = !source.isLive;
  byId("only-differences").checked = names.length > 1;
  document.title = `${names.join(", ")}: megatron-grpo`;
  fillSelect("sort", Object.entries(SORTS).map(([name, [label]]) => [name, label]));
  fillSelect("colouring", Object.entries(COLOURINGS).map(([name, { label }]) => [name, label]));
  connect();
  showTab("completions");
  await poll();
  drawConfigs();
  if (source.isLive) pollAgain();
}

/* Numbers of the runs in the address, or of all runs that have a colour of their own. */
function openedOf(runs) {
  const asked = new URLSearchParams(location.search).get("runs")?.split(",").map(Number);
  if (asked) return asked.filter((number) => number in runs);
  return [...runs.keys()].slice(0, runs.length > RUN_COLOURS.length ? 1 : undefined);
}

function fillSelect(id, options) {
  byId(id).replaceChildren(...options.map(([value, label]) => h("option", { value }, label)));
}

/* Fetch new records of every run, and show them. */
async function poll() {
  const news = await Promise.all(state.runs.map(async (run, i) => {
    const last = run.records.at(-1);
    return merge(run, await source.metrics(i, run.offset, last ? last.step : -1));
  }));
  if (!news.some(Boolean)) return;
  const newest = currentRun().records.at(-1)?.step ?? null;
  byId("last").textContent = newest === null ? "no steps yet" : `of ${newest}`;
  if (newest !== null && (state.step === null || (source.isLive && byId("follow").checked))) {
    await showStep(newest);
  }
  drawCurves();
  drawEvaluations();
}

/* Add new records to a run; returns whether there were any. */
function merge(run, { records, offset, starts_again }) {
  const last = run.records.at(-1);
  const isSame = records.length === (last ? 1 : 0) && JSON.stringify(records[0]) === JSON.stringify(last);
  run.offset = offset;
  if (isSame) return false;
  // The first may be the last known record, with metrics that were added to it.
  run.records = starts_again ? records : [...run.records.slice(0, -1), ...records];
  return true;
}

async function pollAgain() {
  await new Promise((done) => setTimeout(done, 1000 * SECONDS_BETWEEN_POLLS));
  try {
    if (!document.hidden) await poll();
    byId("notice").textContent = "";
  } catch (error) {
    byId("notice").textContent = `megatron-grpo view does not answer: ${error.message}`;
  }
  pollAgain();
}

const currentRun = () => state.runs[state.run];

/* Show a step that the user has chosen, and stop following the newest. */
async function selectStep(step) {
  const steps = currentRun().records.map((record) => record.step);
  if (!steps.length) return;
  byId("last").textContent = `of ${steps.at(-1)}`;
  byId("follow").checked = byId("all-steps").checked = false;
  await showStep(Math.min(Math.max(step, steps[0]), steps.at(-1)));
}

async function showStep(step) {
  const isNew = step !== state.step;
  state.step = step;
  byId("step").value = step;
  if (isNew) moveCursor();
  await Promise.all([loadCompletions(), ...(byId("timeline").hidden ? [] : [drawTimeline()])]);
}

function showTab(name) {
  for (const button of document.querySelectorAll("#tabs button")) {
    const isShown = button.dataset.tab === name;
    button.classList.toggle("selected", isShown);
    byId(button.dataset.tab).hidden = !isShown;
  }
  if (name === "timeline" && state.step !== null) drawTimeline();
}

function connect() {
  byId("step").onchange = () => selectStep(numberIn("step") ?? state.step);
  byId("previous").onclick = () => selectStep(state.step - 1);
  byId("next").onclick = () => selectStep(state.step + 1);
  byId("follow").onchange = () => byId("follow").checked && showStep(currentRun().records.at(-1).step);
  byId("run").onchange = () => {
    state.run = Number(byId("run").value);
    byId("other-run").value = state.run;
    selectStep(state.step);
  };
  for (const id of FILTERS) byId(id).oninput = showList;
  for (const id of ["kind", "all-steps", ...QUERY]) byId(id).onchange = loadCompletions;
  byId("download").onclick = download;
  byId("smoothing").oninput = drawCurves;
  byId("colouring").onchange = () => state.row && read(state.row);
  byId("other-run").onchange = byId("other-step").onchange = () => readOther();
  byId("find-steps").onclick = findSteps;
  byId("metric-search").oninput = searchMetrics;
  byId("only-differences").onchange = drawConfigs;
  for (const button of document.querySelectorAll("#tabs button")) {
    button.onclick = () => showTab(button.dataset.tab);
  }
  document.onkeydown = onKey;
  matchMedia("(prefers-color-scheme: dark)").onchange = drawCurves;
}

/* Arrow keys: left and right through the steps, up and down through the completions. */
function onKey(event) {
  if (event.target.matches("input, select, textarea") || event.ctrlKey || event.altKey || event.metaKey) return;
  const move = {
    ArrowLeft: () => selectStep(state.step - 1), ArrowRight: () => selectStep(state.step + 1),
    ArrowUp: () => readNext(-1), ArrowDown: () => readNext(1),
  }[event.key];
  if (!move) return;
  event.preventDefault();
  move();
}

start();
