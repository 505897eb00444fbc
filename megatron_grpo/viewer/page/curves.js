"use strict";
/* The metrics over steps: which are drawn, and the cursor at the selected step. */

const IMPORTANT = [
  /^reward$/, /^reward\/.+\/mean$/, /^frac_reward_zero_std$/, /^entropy$/,
  /^completions\/mean_length$/, /^completions\/clipped_ratio$/, /^rollout\/logprob_gap_mean$/,
  /^grad_norm$/, /^kl$/, /^time\/step$/,
];
const RUN_COLOURS = ["#2f7fd6", "#e08a2c", "#2e9e74", "#d0493e", "#8561c5", "#4fa9c4", "#a8792f"];
const POINTS_WITH_MARKERS = 60;
const runColour = (run) => RUN_COLOURS[run % RUN_COLOURS.length];

const curves = { chosen: null, names: [] };

/* Draw new records, and add new metrics to the chooser. */
function drawCurves() {
  const names = metricNames();
  if (names.join() !== curves.names.join()) {
    curves.names = names;
    curves.chosen ??= new Set(IMPORTANT.flatMap((one) => names.filter((name) => one.test(name))));
    drawChooser();
  }
  const important = IMPORTANT.flatMap((one) => names.filter((name) => one.test(name)));
  const order = [...new Set([...important, ...names])].filter((name) => curves.chosen.has(name));
  const plots = byId("plots");
  const there = new Map([...plots.children].map((figure) => [figure.dataset.metric, figure]));
  plots.replaceChildren(...order.map((name) => there.get(name) ?? newFigure(name)));
  for (const figure of plots.children) drawCurve(figure);
}

/* Metrics with a number in some record, in the order in which they are recorded. */
function metricNames() {
  const names = new Set();
  for (const run of state.runs) {
    for (const record of run.records) {
      for (const name in record) if (record[name] !== null) names.add(name);
    }
  }
  names.delete("step");
  return [...names];
}

function newFigure(name) {
  return h("figure", { "data-metric": name }, h("figcaption", {}, name), h("div", { className: "plot" }));
}

function drawCurve(figure) {
  const name = figure.dataset.metric;
  const width = Math.max(numberIn("smoothing"), 1);
  const traces = state.runs.flatMap((run, i) => {
    const records = run.records.filter((record) => (record[name] ?? null) !== null);
    const values = records.map((record) => record[name]);
    const trace = {
      name: run.name,
      x: records.map((record) => record.step),
      y: smooth(values, width),
      mode: records.length < POINTS_WITH_MARKERS ? "lines+markers" : "lines",
      line: { width: 1.6, color: runColour(i) },
      marker: { size: records.length === 1 ? 8 : 4 },
      hovertemplate: state.runs.length > 1 ? `%{y:.5g} ${escaped(run.name)}<extra></extra>`
        : "step %{x}: %{y:.5g}<extra></extra>",
    };
    return width > 1 ? [{ ...trace, y: values, opacity: 0.25, hoverinfo: "skip" }, trace] : [trace];
  });
  const plot = figure.querySelector(".plot");
  const isNew = !plot.data;
  Plotly.react(plot, traces, { ...plotLayout(), shapes: [cursor()] }, PLOT_OPTIONS);
  if (isNew) plot.on("plotly_click", (event) => selectStep(event.points[0].x));
}

/* Means over each value and those before it, `width` together. */
function smooth(values, width) {
  return values.map((_, k) => mean(values.slice(Math.max(k + 1 - width, 0), k + 1)));
}

const PLOT_OPTIONS = { displayModeBar: false, responsive: true };

/* Plotly renders some HTML in names: escape it. */
function escaped(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
}

function plotLayout() {
  const axis = {
    gridcolor: cssColour("--line"), zerolinecolor: cssColour("--line"), automargin: true,
    tickfont: { size: 10 }, nticks: 4, exponentformat: "e",
  };
  return {
    height: 118,
    margin: { l: 8, r: 8, t: 4, b: 20 },
    showlegend: false,
    hovermode: state.runs.length > 1 ? "x unified" : "x",
    hoverdistance: -1,  // a click selects the nearest step wherever it is
    hoverlabel: {
      bgcolor: cssColour("--card"), bordercolor: cssColour("--line"),
      font: { color: cssColour("--ink"), size: 11 },
    },
    uirevision: "keep",  // what was zoomed stays so while steps come in
    paper_bgcolor: "transparent",
    plot_bgcolor: "transparent",
    font: { color: cssColour("--faint"), family: "system-ui, sans-serif" },
    xaxis: { ...axis, tickformat: "d", rangemode: "normal" },
    yaxis: axis,
  };
}

function cursor() {
  return {
    type: "line", layer: "below", yref: "paper", y0: 0, y1: 1, x0: state.step, x1: state.step,
    visible: state.step !== null, line: { color: cssColour("--accent"), width: 1.5, dash: "dot" },
  };
}

function moveCursor() {
  for (const plot of document.querySelectorAll("#plots .plot")) {
    Plotly.relayout(plot, { shapes: [cursor()] });
  }
}

/* Check boxes of all metrics, grouped by the part of their names before the first /. */
function drawChooser() {
  const groups = Map.groupBy(curves.names, (name) => name.includes("/") ? name.split("/")[0] : "step");
  byId("metric-groups").replaceChildren(...[...groups].map(([prefix, names]) =>
    h("fieldset", {}, h("legend", {}, prefix === "step" ? "of the step" : `${prefix}/`),
      ...names.map((name) => {
        const box = h("input", { type: "checkbox", checked: curves.chosen.has(name), value: name });
        box.onchange = () => {
          if (box.checked) curves.chosen.add(name);
          else curves.chosen.delete(name);
          drawCurves();
        };
        return h("label", { "data-name": name }, box, name.replace(`${prefix}/`, ""));
      }))));
  searchMetrics();
}

function searchMetrics() {
  const text = byId("metric-search").value;
  for (const label of document.querySelectorAll("#metric-groups label")) {
    label.hidden = !label.dataset.name.includes(text);
  }
  for (const group of document.querySelectorAll("#metric-groups fieldset")) {
    group.hidden = !group.querySelector("label:not([hidden])");
  }
}
