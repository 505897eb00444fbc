"""Rehearsal: a session played before the run, in which the row's answer stands for every turn.

It shows a user which tokens would be trained on, without an engine.
"""

import asyncio
from collections.abc import Sequence
from contextlib import closing
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from megatron_grpo.agents.agents import TRIAL_SECONDS, Agents
from megatron_grpo.agents.partners import Environments
from megatron_grpo.config.agent import AGENT
from megatron_grpo.config.config import Config
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample
from megatron_grpo.engines.choice import Choice, Logprobs, Token, WeightVersion
from megatron_grpo.engines.request import Request, SamplingParams
from megatron_grpo.rewards.pool import MADE_UP_COMPLETIONS
from megatron_grpo.workers.event_loop import EventLoop
from parallel.words import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class AnswerOfRow:
    """Stands for client and router: completes each turn with the answer of the row."""

    def __init__(
        self, prompt: Prompt, tokenizer: "PreTrainedTokenizerBase", end_tokens: Sequence[int]
    ) -> None:
        self.loop = EventLoop()
        self.text = str(prompt.row.get("answer", MADE_UP_COMPLETIONS[0][0]))
        self._token_ids = [
            *tokenizer(self.text, add_special_tokens=False)["input_ids"],
            end_tokens[0],
        ]

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            ids = self._token_ids[: request.body["sampling_params"]["max_tokens"]]
            choice = Choice(
                token_ids=ids,
                logprobs=Logprobs([Token(0.0) for _ in ids]),
                finish_reason="stop" if ids == self._token_ids else "length",
                text=self.text,
                weight_versions=[WeightVersion("0", 0, len(ids))],
            )
            request.answer.set_result((choice, ""))


class RehearsedAgents(Agents):
    """Agents whose turns no engine parses: the message is the text."""

    async def _parse(self, choice: Choice, _request: Any, _url: str) -> dict[str, Any]:
        return {"role": "assistant", "content": choice.text}


def rehearse(
    cfg: Config, tokenizer: "PreTrainedTokenizerBase", end_tokens: Sequence[int], prompt: Prompt
) -> str:
    """Play a session of `prompt` with its environment or agent; returns its tokens and their mask
    as text, and why it ended."""
    params = SamplingParams(
        num_generations=1,
        policy_version=0,
        temperature=cfg.rollout.temperature,
        max_completion_length=cfg.rollout.max_completion_length,
        stop_token_ids=end_tokens,
        seed=cfg.train.seed,
        series=0,
    )
    stub: Any = AnswerOfRow(prompt, tokenizer, end_tokens)
    with closing(stub.loop):
        partner: Agents | Environments
        if cfg.partner == AGENT:
            partner = RehearsedAgents(cfg, tokenizer, end_tokens, stub)
        else:
            partner = Environments(cfg, tokenizer, end_tokens)
        with closing(partner):
            partner.wait_ready([])
            group = partner.groups(cfg)(prompt, params, 0, None)
            try:
                [sample] = stub.loop.call(asyncio.wait_for(group.sample(stub), TRIAL_SECONDS))
            except TimeoutError:
                return f"row {prompt.index} of the data: not over after {TRIAL_SECONDS:g} s"
    end = "; ".join(group.failures) or (
        f"finish reason {sample.finish_reason}, reward {sample.dialogue_reward:g}"
    )
    return "\n".join(
        [
            f"row {prompt.index} of the data, with {stub.text!r} for each turn of the model:",
            *masked_lines(sample, tokenizer),
            f"  the end: {end}",
        ]
    )


def masked_lines(sample: Sample, tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """A line for each run of tokens that enter the loss, or do not; for each of an agent's
    sequences, with its context.

    Example: `  trained: 2 tokens '42<|im_end|>'`
    """
    first = len(sample.prompt.token_ids)
    ids = [*sample.prompt.token_ids, *sample.completion_ids]
    lines = []
    for number, branch in enumerate(sample.sequences):
        if sample.branches:
            lines.append(f"  sequence {number + 1} of {len(sample.branches)}:")
        tokens = [(token, 0) for start, end in branch.context for token in ids[start:end]]
        own = slice(branch.start, branch.end)
        tokens += zip(ids[first:][own], sample.loss_mask[own], strict=True)
        for is_trained, run in groupby(tokens, key=itemgetter(1)):
            part = [token for token, _ in run]
            name = "trained" if is_trained else "not trained"
            lines.append(f"  {name}: {counted(len(part), 'token')} {tokenizer.decode(part)!r}")
    return lines
