"use strict";
/* Other tabs: evaluations, timeline and configs. */

const isEvaluated = (record) => Object.keys(record).some((name) => name.startsWith("eval/"));

function table(head, rows) {
  return h("table", {},
    h("thead", {}, h("tr", {}, ...head.map((text) => h("th", {}, text)))),
    h("tbody", {}, ...rows));
}

/* All runs, to open one or to compare some: the page is loaded again with those that are checked. */
function drawRuns(runs) {
  byId("runs").hidden = runs.length === 1;
  byId("runs").querySelector(".table").replaceChildren(table(["run", "step", "reward", "changed"],
    runs.map(({ name, step, reward, changed }, number) => {
      const place = source.opened.indexOf(number);
      const box = h("input", { type: "checkbox", checked: place >= 0, value: number, onchange: openChecked });
      const colour = place < 0 ? {} : { style: `--colour: ${runColour(place)}` };
      return h("tr", {}, h("td", {}, h("label", colour, box, name)),
        ...[step, reward].map((value) => h("td", {}, short(value))),
        h("td", {}, changed ? new Date(1000 * changed).toLocaleString() : "–"));
    })));
}

function openChecked() {
  const checked = [...byId("runs").querySelectorAll("input:checked")].map((box) => box.value);
  if (checked.length) location.search = `runs=${checked.join(",")}`;
}

/* One row per evaluation of each run; a click shows its completions. */
function drawEvaluations() {
  const found = state.runs.flatMap((run, i) =>
    run.records.filter(isEvaluated).map((record) => ({ i, run, record })));
  if (!found.length) {
    byId("evaluations").replaceChildren(h("p", { className: "hint" },
      "no evaluations yet: the config section eval names held-out prompts"));
    return;
  }
  const names = [...new Set(found.flatMap(({ record }) => Object.keys(record)))]
    .filter((name) => name.startsWith("eval/"));
  const rows = found.map(({ i, run, record }) => h("tr", {
    className: "link",
    onclick: () => showEvaluation(i, record.step),
  }, ...(state.runs.length > 1 ? [h("td", {}, run.name)] : []), h("td", {}, String(record.step)),
  ...names.map((name) => h("td", {}, short(record[name])))));
  const head = [...(state.runs.length > 1 ? ["run"] : []), "step",
    ...names.map((name) => name.replace("eval/", ""))];
  byId("evaluations").replaceChildren(table(head, rows));
}

async function showEvaluation(run, step) {
  byId("run").value = state.run = run;
  byId("kind").value = "eval_completions";
  showTab("completions");
  await selectStep(step);
}

const STEPS_AROUND = 2;

/* Timeline of the selected step and of the steps around it. */
async function drawTimeline() {
  const [first, last] = [state.step - STEPS_AROUND, state.step + STEPS_AROUND];
  const events = await source.timeline(state.run, Math.max(first, 0), last);
  const names = events.filter((event) => event.ph === "M").map((event) => [event.tid, event.args.name]);
  const phases = events.filter((event) => event.ph === "X");
  byId("timeline").querySelector("p").textContent = phases.length
    ? `step ${state.step}, and paler ${STEPS_AROUND} steps before and after it: wall-clock seconds`
    : `the timeline has no events of step ${state.step}`;
  const start = Math.min(...phases.map((event) => event.ts));
  const rows = new Map(names);
  const traces = [...Map.groupBy(phases, (event) => event.name)].map(([name, those]) => ({
    type: "bar", orientation: "h", name,
    base: those.map((event) => (event.ts - start) / 1e6),
    x: those.map((event) => event.dur / 1e6),
    y: those.map((event) => rows.get(event.tid) ?? `row ${event.tid}`),
    customdata: those.map((event) => JSON.stringify(event.args).replace(/[{}"]/g, "")),
    hovertemplate: `${escaped(name)} %{x:.3g} s<br>%{customdata}<extra></extra>`,
    marker: { opacity: those.map((event) => (event.args.step ?? state.step) === state.step ? 1 : 0.4) },
  }));
  const layout = plotLayout();
  Plotly.react(byId("timeline").querySelector(".plot"), traces, {
    ...layout, height: 150 + 60 * rows.size, barmode: "overlay", hovermode: "closest", showlegend: true,
    legend: { orientation: "h", y: -0.25 },
    uirevision: state.step,
    xaxis: { ...layout.xaxis, tickformat: "", ticksuffix: " s", nticks: 10 },
    yaxis: { ...layout.yaxis, autorange: "reversed" },
  }, PLOT_OPTIONS);
}

/* Flatten nested tables: full names with values. */
function flat(config, prefix = "") {
  return Object.entries(config).flatMap(([key, value]) =>
    value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length
      ? flat(value, `${prefix}${key}.`) : [[prefix + key, JSON.stringify(value)]]);
}

/* Every key with its value in each run. */
function drawConfigs() {
  const configs = state.runs.map((run) => new Map(flat(run.config)));
  const keys = [...new Set(configs.flatMap((config) => [...config.keys()]))];
  const rows = keys.map((key) => {
    const values = configs.map((config) => config.get(key) ?? "–");
    return { key, values, differs: new Set(values).size > 1 };
  }).filter((row) => row.differs || !byId("only-differences").checked);
  byId("config").querySelector(".table").replaceChildren(
    table(["key", ...state.runs.map((run) => run.name)], rows.map(({ key, values, differs }) =>
      h("tr", { className: differs ? "differs" : "" }, h("th", {}, key),
        ...values.map((value) => h("td", {}, value))))));
}
