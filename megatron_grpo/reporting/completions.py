"""Completions of an optimizer step, and their tokens, as rows for JSON."""

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

from tokenizers.decoders import DecodeStream
from torch import Tensor

from megatron_grpo.batch.experience import Experience
from megatron_grpo.batch.token_log import VALUES, first_rows
from megatron_grpo.data.samples import (
    Branch,
    Heard,
    Sample,
    columns_by_prompt,
    finite_or_none,
    sample_row,
)
from megatron_grpo.reporting.metrics import StepReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DIGITS = 5
"""Significant digits of token values: 9 bytes for each, and no visible rounding."""


def completion_rows(
    step: int,
    experience: Experience,
    indices: Sequence[int],
    report: StepReport,
    prompt_column: str,
    tokenizer: "PreTrainedTokenizerBase",
) -> list[dict[str, Any]]:
    """One row for each completion in `indices`, which `report` covers.

    `prompt_index` is the data row, `columns` its other columns; dialogues have `turns`. Entropy and
    gap are null without tokens in the loss.
    """
    columns = columns_by_prompt([experience.samples[i] for i in indices], prompt_column)
    return [
        {
            "step": step,
            **sample_row(sample, experience.rewards[i], float(experience.totals[i]), columns),
            "advantage": float(experience.advantages[i]),
            "entropy": finite_or_none(entropy),
            "logprob_gap": finite_or_none(gap),
            **({"turns": turns_of(sample, tokenizer)} if sample.step_rewards else {}),
        }
        for i, entropy, gap in zip(indices, report.entropy, report.rollout_gap, strict=True)
        for sample in [experience.samples[i]]
    ]


def turns_of(sample: Sample, tokenizer: "PreTrainedTokenizerBase") -> list[dict[str, Any]]:
    """Turns of a dialogue, or scored steps of a process reward model.

    `role` is `assistant`, or for observations `environment` or the roles of an agent's messages,
    such as `tool`. `text` of the assistant has its special tokens, that of others no text of the
    chat template. `reward` is the reward of the step, null for observations; `calls` names the
    tools that a turn called; `branch` numbers the sequences of an agent with several, from 0.
    """
    rewards, mask = dict(sample.step_rewards), sample.loss_mask
    ends = [token for token, _ in sample.step_rewards]
    heard = dict(zip(ends, sample.heard, strict=True)) if sample.heard else {}
    parts = accumulate(len(list(tokens)) for _, tokens in groupby(mask))
    firsts = [_first_token(branch, len(sample.prompt.token_ids)) for branch in sample.branches]
    starts = {*firsts} - {0}
    turns: list[dict[str, Any]] = []
    start = 0
    for stop in sorted({*parts, *starts, *(token + 1 for token in rewards)}):
        turn = {
            "role": "assistant" if mask[start] else "environment",
            "text": tokenizer.decode(list(sample.completion_ids[start:stop])),
            "reward": rewards.get(stop - 1),
            "num_tokens": stop - start,
        }
        if sample.branches:
            turn["branch"] = sum(first < stop for first in firsts) - 1
        roles, calls, texts = heard.get(stop - 1, Heard((), ()))
        if calls:
            turn["calls"] = calls
        if roles and turns and turns[-1]["role"] == "environment":
            turns[-1]["role"] = ", ".join(dict.fromkeys(roles))
            turns[-1]["text"] = "\n".join(texts) or turns[-1]["text"]
        turns.append(turn)
        start = stop
    return turns


def _first_token(branch: Branch, num_prompt_tokens: int) -> int:
    """Index of a branch's first own token in the completion."""
    # A branch that shares no token with earlier ones has its first own token as context
    # (`TokenTree.sequences`), so it begins one token before `start`.
    (first, end), *others = branch.context
    if branch.start and not others and (first, end) == (end - 1, num_prompt_tokens + branch.start):
        return first - num_prompt_tokens
    return branch.start


def token_rows(
    step: int,
    experience: Experience,
    indices: Sequence[int],
    values: Tensor,
    tokenizer: "PreTrainedTokenizerBase",
) -> list[dict[str, Any]]:
    """One row for each completion of the optimizer batch `indices` with values in the `TokenLog`.

    Lists have an entry per token of the completion, or of its beginning if the log had no more
    room. `mask` is 1 for tokens in the loss; other tokens' values, and NaN or infinity, are null.
    `policy_version` is a list if tokens have several versions, else a number.
    """
    samples = [experience.samples[i] for i in indices]
    firsts = first_rows([len(sample.completion_ids) for sample in samples], len(values))
    rows = []
    for i, sample, first in zip(indices, samples, firsts, strict=True):
        if first is None:
            continue
        ids = list(sample.completion_ids[: len(values) - first])
        versions = [version for version, count in sample.versions for _ in range(count)][: len(ids)]
        found = dict(zip(VALUES, values[first : first + len(ids)].T.tolist(), strict=True))
        mask = [int(counts) for counts in found.pop("mask")]
        advantages = [float(experience.advantages[i])] * len(ids)
        if experience.token_advantages:
            advantages = experience.token_advantages[i][: len(ids)].tolist()
        rows.append(
            {
                "step": step,
                "prompt_index": sample.prompt.index,
                "sample_index": sample.sample_index,
                "policy_version": versions or sample.policy_version,
                "tokens": token_texts(ids, tokenizer),
                "token_ids": ids,
                "mask": mask,
                "rollout_logprob": [_rounded(x) for x in sample.logprobs[: len(ids)]],
                "advantage": [_rounded(x) for x in advantages],
                **{
                    name: [
                        _rounded(x) if counts else None
                        for x, counts in zip(column, mask, strict=True)
                    ]
                    for name, column in found.items()
                },
            }
        )
    return rows


def token_texts(ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Text of each token; a character of several tokens belongs to the last one."""
    if not tokenizer.is_fast:  # SentencePiece, where pieces are whole characters
        return [tokenizer.decode([token]) for token in ids]
    stream, texts = DecodeStream(skip_special_tokens=False), []
    for token in ids:
        try:
            text = stream.step(tokenizer.backend_tokenizer, token)
        # tokenizers raises a bare Exception for bytes that are no character: start a new stream.
        except Exception:
            stream = DecodeStream(skip_special_tokens=False)
            text = stream.step(tokenizer.backend_tokenizer, token)
        texts.append(text or "")
    return texts


def _rounded(value: float) -> float | None:
    return finite_or_none(float(f"{value:.{DIGITS}g}"))
