"use strict";
/* Reading pane: a completion, and a second one of its prompt at another step. */

/* Open a completion that the user has chosen: a new step must not replace it. */
function choose(row) {
  byId("follow").checked = false;
  return read(row);
}

/* Show one of the rows in state.shown. */
async function read(row) {
  state.row = row;
  markSelected();
  await fillPane(byId("pane"), state.shown, row, choose);
  await readOther();
}

/* Second pane, if there is a step to compare with: its completion of this prompt at the equal
   position, or at the chosen one. */
async function readOther(position = groupOf(state.row, state.shown.rows).indexOf(state.row)) {
  const pane = byId("other-pane");
  const step = numberIn("other-step");
  pane.hidden = step === null || !state.row;
  if (pane.hidden) return;
  const { kind } = state.shown;
  const rows = await source.rows(state.run, kind, step);
  const group = groupOf(state.row, rows);
  if (!group.length) {
    const held = source.heldSteps(state.run, kind);
    pane.replaceChildren(h("p", { className: "hint" },
      `step ${step} has no completions of this prompt${held ? ` (${held})` : ""}`));
    return;
  }
  const shown = { ...(await withTokens(kind, step)), rows };
  await fillPane(pane, shown, group[position] ?? group[0], (_, chosen) => readOther(chosen));
}

/* Rows of a row's prompt. */
function groupOf(row, rows) {
  return row ? rows.filter((other) => groupKey(other) === groupKey(row)) : [];
}

/* A kind of completions, a step, and the keys of its rows with tokens. */
async function withTokens(kind, step) {
  const keys = kind === "completions" ? await source.tokenKeys(state.run, step) : [];
  return { kind, step, tokenKeys: new Set(keys.map((key) => key.join("/"))) };
}

const hasTokens = (shown, row) => shown.tokenKeys.has(`${row.prompt_index}/${row.sample_index}`);

async function fillPane(pane, shown, row, onChoice) {
  pane.wanted = row;
  const tokens = hasTokens(shown, row)
    ? await source.tokens(state.run, shown.step, row.prompt_index, row.sample_index) : null;
  if (pane.wanted !== row) return;  // another was chosen meanwhile
  const samples = groupOf(row, shown.rows).map((other, position) => h("button", {
    className: other === row ? "chip selected" : "chip",
    onclick: () => onChoice(other, position),
  }, `${other.sample_index ?? "–"}: ${short(other.reward, 3)}`));
  pane.replaceChildren(
    h("h2", {}, `step ${row.step}, ${titleOf(row)}`),
    h("div", { className: "chips", title: "All completions of the prompt, by reward" }, ...samples),
    factTable(row),
    h("details", { open: row.prompt.length < 600 }, h("summary", {}, "prompt"),
      h("div", { className: "text" }, row.prompt)),
    ...body(row, tokens));
  pane.onmousemove = (event) => tokens && showValues(event, tokens);
  pane.onmouseleave = () => { byId("values").hidden = true; };
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
    ...row.columns,
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
  const steps = await source.stepsOfPrompt(state.run, state.row.prompt_index);
  const others = steps.filter((step) => step !== state.row.step);
  byId("found-steps").replaceChildren(...(others.length ? others.map((step) =>
    h("button", { className: "chip", onclick: () => compareWith(step) }, String(step))) : ["no other step"]));
}

async function compareWith(step) {
  byId("other-step").value = step;
  await readOther();
}
