"use strict";
/* Reading pane: a completion, and a second one of its prompt at another step or of another run. */

/* Open a completion that the user has chosen: a new step must not replace it. */
function choose(row) {
  byId("follow").checked = false;
  return read(row);
}

/* Show one of the rows in state.shown. */
async function read(row) {
  state.row = row;
  markSelected();
  const shown = state.shown.query === undefined ? state.shown : await stepOf(state.run, row.step);
  if (state.row !== row) return;  // another was chosen meanwhile
  await fillPane(byId("pane"), state.run, shown, row, choose);
  await readOther();
}

/* Completions of one step, as in state.shown. */
async function stepOf(run, step) {
  const { kind } = state.shown;
  return { ...(await withTokens(run, kind, step)), rows: await source.rows(run, kind, step) };
}

/* Second pane, if there is a step to compare with: its completion of this prompt with the equal
   number, or with the chosen one. */
async function readOther(sample = state.row?.sample_index) {
  const pane = byId("other-pane");
  const step = numberIn("other-step"), run = Number(byId("other-run").value);
  pane.hidden = step === null || !state.row;
  if (pane.hidden) return;
  const shown = await stepOf(run, step);
  const group = groupOf(state.row, shown.rows);
  if (!group.length) {
    const held = source.heldSteps(run, state.shown.kind);
    pane.replaceChildren(h("p", { className: "hint" },
      `step ${step} has no completions of this prompt${held ? ` (${held})` : ""}`));
    return;
  }
  const row = group.find((each) => each.sample_index === sample) ?? group[0];
  await fillPane(pane, run, shown, row, (chosen) => readOther(chosen.sample_index));
}

/* Rows of a row's prompt. */
function groupOf(row, rows) {
  return row ? rows.filter((other) => groupKey(other) === groupKey(row)) : [];
}

/* A kind of completions, a step, and the keys of its rows with tokens. */
async function withTokens(run, kind, step) {
  const keys = kind === "completions" ? await source.tokenKeys(run, step) : [];
  return { kind, step, tokenKeys: new Set(keys.map((key) => key.join("/"))) };
}

const hasTokens = (shown, row) => shown.tokenKeys.has(`${row.prompt_index}/${row.sample_index}`);

async function fillPane(pane, run, shown, row, onChoice) {
  pane.wanted = row;
  const tokens = hasTokens(shown, row)
    ? await source.tokens(run, shown.step, row.prompt_index, row.sample_index) : null;
  if (pane.wanted !== row) return;  // another was chosen meanwhile
  const samples = groupOf(row, shown.rows).map((other) => h("button", {
    className: other.sample_index === row.sample_index ? "chip selected" : "chip",
    onclick: () => onChoice(other),
  }, `${other.sample_index ?? "–"}: ${short(other.reward, 3)}`));
  pane.replaceChildren(
    h("h2", {}, `${run === state.run ? "" : `${state.runs[run].name}, `}step ${row.step}, ${titleOf(row)}`),
    h("div", { className: "chips", title: "All completions of the prompt, by reward" }, ...samples),
    factTable(row),
    ...promptOf(row),
    ...(row.failure ? [h("div", { className: "text failure" }, row.failure)] : []),
    ...body(row, tokens));
  pane.onmousemove = (event) => tokens && showValues(event, tokens);
  pane.onmouseleave = () => { byId("values").hidden = true; };
}

/* The messages of the prompt, and behind a click the text that the model read. */
function promptOf(row) {
  const chat = (row.messages ?? []).map(({ role, content }) => turnElement({ role }, [content]));
  const isOpen = !chat.length && row.prompt.length < 600;
  return [...chat, h("details", { open: isOpen },
    h("summary", {}, chat.length ? "prompt with the chat template" : "prompt"),
    h("div", { className: "text" }, row.prompt))];
}

function titleOf(row) {
  const prompt = row.prompt_index === undefined ? "prompt" : `prompt ${row.prompt_index}`;
  return (row.set ? `${row.set}, ` : "") + prompt;
}

function factTable(row) {
  const facts = {
    reward: row.reward === null ? "failed" : row.reward, ...row.rewards, passed: row.passed,
    advantage: row.advantage, "num_tokens": row.num_tokens, finish_reason: row.finish_reason,
    entropy: row.entropy, logprob_gap: row.logprob_gap,
    policy_version: isStale(row) ? `${row.policy_version} (stale)` : row.policy_version,
    ...row.metrics, ...row.columns,
  };
  return h("dl", { className: "facts" }, ...Object.entries(facts)
    .filter(([, value]) => value !== undefined)
    .map(([name, value]) => h("div", {}, h("dt", {}, name),
      h("dd", {}, typeof value === "object" && value ? JSON.stringify(value) : short(value)))));
}

/* The completion: its tokens if they were recorded, or its turns, or its text. */
function body(row, tokens) {
  const turns = row.turns ?? [];
  if (tokens) {
    const blocks = tokenBlocks(tokens, byId("colouring").value, turns);
    const sampled = tokens.mask.filter((each) => each).length;
    if (!(sampled < row.num_tokens)) return blocks;
    return [...blocks, h("p", { className: "hint" },
      `the values of the first ${sampled} of ${row.num_tokens} sampled tokens were recorded`),
      h("details", {}, h("summary", {}, "the whole text"), ...plain(row, turns))];
  }
  return [h("p", { className: "hint" }, "the values of its tokens were not recorded"), ...plain(row, turns)];
}

function plain(row, turns) {
  if (turns.length) return turns.map((each) => turnElement(each, [each.text]));
  return [h("div", { className: "text completion" }, row.completion)];
}

/* Buttons for the steps at which the prompt occurs: a click compares with one. */
async function findSteps() {
  if (state.row?.prompt_index === undefined) return;
  byId("found-steps").textContent = "reading …";
  const run = Number(byId("other-run").value);
  const steps = await source.stepsOfPrompt(run, state.row.prompt_index);
  const others = steps.filter((step) => run !== state.run || step !== state.row.step);
  byId("found-steps").replaceChildren(...(others.length ? others.map((step) =>
    h("button", { className: "chip", onclick: () => compareWith(step) }, String(step))) : ["no other step"]));
}

async function compareWith(step) {
  byId("other-step").value = step;
  await readOther();
}
