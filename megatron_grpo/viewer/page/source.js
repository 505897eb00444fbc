"use strict";
/* Source of data: the server, or the JSON embedded in the file. */

const embedded = document.getElementById("embedded");
const source = embedded ? fileSource(JSON.parse(embedded.textContent)) : serverSource();

/* Questions name a run by its place among the `opened` ones, which are numbers of all runs. */
function serverSource() {
  const ask = async (question, args = {}) => {
    if ("run" in args) args = { ...args, run: source.opened[args.run] };
    const answer = await fetch(`api/${question}?${new URLSearchParams(args)}`);
    if (!answer.ok) throw new Error(`${question}: ${answer.status} ${answer.statusText}`);
    return answer.json();
  };
  return {
    isLive: true,
    runs: () => ask("runs"),
    config: (run) => ask("config", { run }),
    metrics: (run, offset, step) => ask("metrics", { run, offset, step }),
    rows: (run, kind, step) => ask(kind, { run, step }),
    found: (run, kind, field, sign, text, least) =>
      ask("found", { run, is_eval: Number(kind === "eval_completions"), field, sign, text, least }),
    tokenKeys: (run, step) => ask("token_keys", { run, step }),
    tokens: (run, step, prompt_index, sample_index) =>
      ask("tokens", { run, step, prompt_index, sample_index }),
    stepsOfPrompt: (run, prompt_index) => ask("steps_of_prompt", { run, prompt_index }),
    timeline: (run, first, last) => ask("timeline", { run, first, last }),
    heldSteps: () => "",
  };
}

/* The same questions, answered from the runs in the file. */
function fileSource(runs) {
  const the = (run) => runs[source.opened[run]];
  const at = (run, kind, step) => the(run)[kind].filter((row) => row.step === step);
  return {
    isLive: false,
    runs: async () => runs.map(({ name, records }) => ({ name, ...records.at(-1) })),
    config: async (run) => the(run).config,
    metrics: async (run) => ({ records: the(run).records, offset: 0, starts_again: true }),
    rows: async (run, kind, step) => at(run, kind, step),
    found: async (run, kind) => the(run)[kind],
    tokenKeys: async (run, step) =>
      at(run, "tokens", step).map((row) => [row.prompt_index, row.sample_index]),
    tokens: async (run, step, prompt, sample) =>
      at(run, "tokens", step).find(
        (row) => row.prompt_index === prompt && row.sample_index === sample) ?? null,
    stepsOfPrompt: async (run, prompt) => [...new Set(the(run).completions
      .filter((row) => row.prompt_index === prompt).map((row) => row.step))],
    timeline: async (run, first, last) => eventsOf(the(run).timeline, first, last),
    heldSteps: (run, kind) => {
      const rows = the(run)[kind];
      return rows.length ? `this file holds steps ${rows[0].step} to ${rows.at(-1).step}`
        : "this file holds none";
    },
  };
}

/* Events of the steps `first` to `last`; an event without a step belongs to the step before it. */
function eventsOf(events, first, last) {
  let step = -1;
  return events.filter((event) => {
    step = event.args.step ?? step;
    return event.ph === "M" || (first <= step && step <= last);
  });
}

/* A new element: h("p", {className: "hint"}, "text", another). */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const byId = (id) => document.getElementById(id);
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/* A number in few characters; – for a missing one. */
function short(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  return typeof value === "number" ? String(Number(value.toPrecision(digits))) : String(value);
}
