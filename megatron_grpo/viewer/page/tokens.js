"use strict";
/* A completion token by token, coloured by one of its values. */

const LOW = "47 127 214", HIGH = "214 69 60", AMOUNT = "224 138 44";

/* Colourings of tokens. With a centre, values below it are blue and values above it red; without
   one, a larger value has a stronger colour. */
const COLOURINGS = {
  gap: { label: "log-probability gap", centre: 0 },
  ratio: { label: "ratio", centre: 1 },
  clipped: { label: "clipped", centre: 0 },
  advantage: { label: "advantage", centre: 0 },
  entropy: { label: "entropy" },
  loss_weight: { label: "loss weight" },
  policy_version: { label: "policy version (steps behind)" },
  none: { label: "nothing" },
};
/* Rows of a token's box, in this order. */
const VALUES = [
  "logprob", "rollout_logprob", "gap", "ratio", "advantage", "entropy", "loss_weight",
  "policy_version", "clipped",
];

/* Values to colour the tokens of a row by; null where a token has none. */
function coloured(row, colouring) {
  if (colouring === "policy_version") {
    return row.tokens.map((_, k) => row.step - 1 - valueAt(row, "policy_version", k));
  }
  return row[colouring] ?? row.tokens.map(() => null);
}

/* A row may have one policy version for all of its tokens. */
function valueAt(row, name, k) {
  return Array.isArray(row[name]) ? row[name][k] : row[name];
}

/* The distance from the centre at which the colour is full: few tokens are farther away. */
function rangeOf(values, mask, centre) {
  const distances = values.filter((value, k) => mask[k] && value !== null)
    .map((value) => Math.abs(value - centre)).sort((a, b) => a - b);
  return distances[Math.ceil(0.99 * distances.length) - 1] || distances.at(-1) || 1;
}

/* The legend, and a completion's tokens, in blocks by turn if it is a dialogue. */
function tokenBlocks(row, colouring, turns) {
  const { centre } = COLOURINGS[colouring];
  const values = coloured(row, colouring);
  const range = rangeOf(values, row.mask, centre ?? 0);
  const isDialogue = turns.length > 1, turnOf = isDialogue ? turnsByToken(row, turns) : [];
  const blocks = [];
  row.tokens.forEach((text, k) => {
    if (!blocks.length || blocks.at(-1).turn !== turnOf[k]) blocks.push({ turn: turnOf[k], tokens: [] });
    const colour = row.mask[k] ? background(values[k], centre, range) : "";
    blocks.at(-1).tokens.push(tokenElement(row, k, text, colour));
  });
  const elements = blocks.map(({ turn, tokens }) => isDialogue
    ? turnElement(turn, turn.role === "assistant" || !turn.text ? tokens : [turn.text])
    : h("div", { className: "text" }, ...tokens));
  return [legend(row, colouring, range), ...elements];
}

/* Turn of each token. Rows of older versions have no `num_tokens` of turns: then only the role. */
function turnsByToken(row, turns) {
  if (turns[0].num_tokens !== undefined) {
    return turns.flatMap((each) => Array(each.num_tokens).fill(each));
  }
  const speakers = [{ role: "environment" }, { role: "assistant" }];
  return row.mask.map((counts) => speakers[counts]);
}

function background(value, centre, range) {
  if (value === null || value === undefined) return "";
  const away = value - (centre ?? 0);
  const hue = centre === undefined ? AMOUNT : away < 0 ? LOW : HIGH;
  return `rgb(${hue} / ${Math.min(Math.abs(away) / range, 1) * 0.8})`;
}

function tokenElement(row, k, text, colour) {
  const token = h("span", { className: "token", "data-k": k }, text.replaceAll("\n", "↵\n"));
  token.style.backgroundColor = colour;
  if (!row.mask[k]) token.classList.add("masked");
  const clipped = row.clipped?.[k];
  if (clipped) token.dataset.clipped = clipped < 0 ? "low" : "high";
  return token;
}

/* Element of a turn: text and tool calls of the policy, or an observation by a tool, a user or an
   environment. */
function turnElement({ role, reward, calls, branch }, content) {
  const kind = role === "assistant" ? (calls ? "assistant calling" : "assistant")
    : role === "tool" ? "environment tool" : "environment";
  const known = reward !== null && reward !== undefined;
  const parts = [role, ...(calls ? [`calls ${calls.join(", ")}`] : []),
    ...(known ? [`reward ${short(reward)}`] : []),
    ...(branch === undefined ? [] : [`branch ${branch}`])];
  return h("div", { className: `turn ${kind}` },
    h("span", { className: "role" }, parts.join(", ")), h("div", { className: "text" }, ...content));
}

function legend(row, colouring, range) {
  const { centre } = COLOURINGS[colouring];
  const from = centre === undefined ? 0 : centre - range, to = (centre ?? 0) + range;
  const start = centre === undefined ? "transparent" : `rgb(${LOW} / 0.8), transparent`;
  const end = `rgb(${centre === undefined ? AMOUNT : HIGH} / 0.8)`;
  const bar = h("i", { className: "bar" });
  bar.style.backgroundImage = `linear-gradient(to right, ${start}, ${end})`;
  const clipped = (row.clipped ?? []).filter((side) => side).length;
  return h("p", { className: "legend" },
    ...(colouring === "none" ? [] : [short(from, 3), bar, short(to, 3)]),
    h("span", { className: "masked" }, " masked"),
    h("span", {}, ` ${clipped} of ${row.tokens.length} tokens `),
    h("span", { "data-clipped": "high" }, "clipped"));
}

/* All values of the token under the pointer, in a box below it. */
function showValues(event, row) {
  const box = byId("values");
  const token = event.target.closest(".token");
  box.hidden = !token;
  if (!token) return;
  const k = Number(token.dataset.k);
  const facts = VALUES.filter((name) => row[name] !== undefined)
    .map((name) => h("tr", {}, h("th", {}, name), h("td", {}, short(valueAt(row, name, k), 6))));
  const title = `${JSON.stringify(row.tokens[k])}  token ${k + 1} of ${row.tokens.length}, ` +
    `id ${row.token_ids?.[k] ?? "–"}${row.mask[k] ? "" : ", masked"}`;
  box.replaceChildren(h("table", {}, h("caption", {}, title), ...facts));
  const { left, bottom, top } = token.getBoundingClientRect();
  const isLow = bottom + box.offsetHeight + 8 > innerHeight;
  box.style.left = `${Math.max(0, Math.min(left, innerWidth - box.offsetWidth - 16))}px`;
  box.style.top = `${isLow ? top - box.offsetHeight - 4 : bottom + 4}px`;
}
