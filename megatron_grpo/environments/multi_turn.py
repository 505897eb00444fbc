"""Multi-turn generation: each sample interacts with its environment at its own pace.

Observations become tokens between the model's turns, and those do not enter the loss.
"""

import asyncio
from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_grpo.config.config import Config
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample, extend_spans
from megatron_grpo.engines.choice import Choice
from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.engines.engine import Json
from megatron_grpo.engines.generation import SampleRequests
from megatron_grpo.engines.sampling_params import SamplingParams
from megatron_grpo.environments import EnvironmentFailed, EnvironmentPool, Instance, Step
from megatron_grpo.environments.dialogues import DialogueRequests
from megatron_grpo.environments.turns import Turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Dialogue:
    """One sample in progress: turns of the model with observations between them."""

    prompt: Prompt
    sample_index: int
    instance: Instance
    pending: Future[Any] | None
    """The environment's answer, while it is outstanding or not yet processed."""
    room: int
    """Number of tokens that may still be appended, sampled or observed."""
    # Arrays as in a `Sample`:
    completion_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    loss_mask: "array[int]" = field(default_factory=lambda: array("b"))
    text: str = ""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Version of the weights and number of tokens of each part; an observation counts as of the
    turn before it."""
    routes: list[np.ndarray] = field(default_factory=list)
    """Of each turn, those of the tokens that were new to the engine."""
    step_rewards: list[tuple[int, float]] = field(default_factory=list)
    finish_reason: str = ""
    """Empty until the dialogue ends."""
    failure: str = ""
    """Why the environment failed; empty if it did not."""
    _is_cut: bool = False
    """Whether the last turn has no end token."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return bool(self.finish_reason)

    def add_turn(self, choice: Choice) -> None:
        """Append a turn of the model and submit it to the environment."""
        self._append(choice.token_ids, choice.token_logprobs, True)
        for version, num_tokens in choice.spans:
            extend_spans(self.spans, version, num_tokens)
        self.text += choice.text
        self._is_cut = choice.finish_reason == "length"
        self.pending = self.instance.step(
            choice.text,
            token_ids=choice.token_ids,
            finish_reason=choice.finish_reason,
            tokens_left=self.room,
        )

    def add_first_observation(self, observation: str | None, turns: Turns) -> None:
        """Begin, with the first observation (if any) appended to the prompt."""
        if observation is None:
            return
        longer = turns.with_first_observation(self.prompt, observation)
        room = self.room - (len(longer.token_ids) - len(self.prompt.token_ids))
        if room < 1:
            raise EnvironmentFailed(
                f"its first observation is {1 - room} tokens too long for "
                "rollout.max_completion_length, which includes observations: raise it"
            )
        self.prompt, self.room = longer, room

    def add_step(self, step: Step, turns: Turns, max_turns: int) -> None:
        """Append the observation of an environment step, or end the dialogue."""
        self.step_rewards.append((len(self.completion_ids) - 1, step.reward))
        if self._is_cut:
            self.finish_reason = "length"
        elif step.done:
            self.finish_reason = "stop"
        elif len(self.step_rewards) == max_turns:
            self.finish_reason = "max_turns"
        else:
            tokens, text = turns.encode_observation(step.observation, self.completion_ids[-1])
            if len(tokens) >= self.room:
                self.finish_reason = "length"
            else:
                self._append(tokens, [0.0] * len(tokens), False)
                extend_spans(self.spans, self.spans[-1][0], len(tokens))
                self.text += text

    @property
    def failed_in(self) -> str:
        """The environment's last call: `reset`, or the step of a turn."""
        return f"turn {len(self.step_rewards) + 1}" if self.completion_ids else "reset"

    def fail(self, failure: str) -> None:
        """End the dialogue without a reward; `failure` says why."""
        self.finish_reason, self.failure = "failed", failure

    def _append(self, tokens: Sequence[int], logprobs: Sequence[float], is_sampled: bool) -> None:
        self.completion_ids.extend(tokens)
        self.logprobs.extend(logprobs)
        self.loss_mask.extend([is_sampled] * len(tokens))
        self.room -= len(tokens)


class DialogueGeneration(DialogueRequests[Dialogue]):
    """Dialogues for each prompt, by `params`; otherwise like a `CompletionRequests`.

    Each turn is a separate request with all tokens so far; the engine has their prefix cached. If
    an engine is lost, its dialogues continue on another one with the same request, and environment
    steps already taken are not repeated. Seeds do not depend on timing, but vLLM batches turns as
    they arrive, so sums round differently from run to run and some tokens may differ.
    """

    answerer = "environment"

    def __init__(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        environments: EnvironmentPool,
        turns: Turns,
        max_turns: int,
    ) -> None:
        super().__init__(params)
        self._turns, self._max_turns = turns, max_turns
        for prompt in prompts:
            for index in range(params.num_generations):
                instance = environments.new_instance()
                own_seed = self._params.turn_seed(len(self.dialogues), turn=-1)
                first = instance.reset(prompt.text, prompt.row, own_seed)
                dialogue = Dialogue(prompt, index, instance, first, params.max_completion_length)
                self.dialogues.append(dialogue)

    def numbers(self) -> range:
        """Those of the dialogues."""
        return range(len(self.dialogues))

    def open_request(self, number: int) -> Json | None:
        """The next request of a dialogue, unless it has ended or waits for its environment."""
        dialogue = self.dialogues[number]
        is_open = not dialogue.is_over and dialogue.pending is None
        return self._request(number, dialogue) if is_open else None

    def is_waiting(self, number: int) -> bool:
        """Whether a dialogue waits for its environment."""
        return self.dialogues[number].pending is not None

    @property
    def failures(self) -> list[str]:
        """One line per failed environment: prompt, sample, `reset` or turn, and why."""
        return [
            f"prompt {dialogue.prompt.index}, sample {dialogue.sample_index}, "
            f"{dialogue.failed_in}: {dialogue.failure}"
            for dialogue in self.dialogues
            if dialogue.failure
        ]

    def add_answer(self, number: int, choice: Choice, url: str) -> None:
        """Take a turn from the engine at `url`, for which its environment is asked."""
        dialogue = self.dialogues[number]
        # An engine of a training run returns them to evaluations, too.
        if self._params.has_routes:
            dialogue.routes.append(choice.routes)
        dialogue.add_turn(choice)
        self.engines.add(url)
        self.begun.pop(number, None)

    async def next_request(self, number: int) -> Json | None:
        """Wait for the environment of a dialogue; returns the next request, None at the end."""
        dialogue = self.dialogues[number]
        if dialogue.pending is not None:
            try:  # if this is cancelled while it waits, the answer stays pending for a later call
                answer = await asyncio.wrap_future(dialogue.pending)
                if dialogue.completion_ids:
                    dialogue.add_step(Step(*answer), self._turns, self._max_turns)
                else:
                    dialogue.add_first_observation(answer, self._turns)
            except EnvironmentFailed as failure:
                dialogue.fail(str(failure))
            dialogue.pending = None
            if dialogue.is_over:
                dialogue.instance.end()
                self._complete_group(number)
        return None if dialogue.is_over else self._request(number, dialogue)

    def abandon(self) -> None:
        """End the environments of all dialogues that have not ended, even in mid-step."""
        for dialogue in self.dialogues:
            if not dialogue.is_over:
                dialogue.instance.end()

    def sample_of(self, dialogue: Dialogue) -> Sample:
        """The sample of a dialogue that has ended."""
        spans, routes = dialogue.spans, dialogue.routes
        return Sample(
            prompt=dialogue.prompt,
            sample_index=dialogue.sample_index,
            completion_ids=dialogue.completion_ids,
            logprobs=dialogue.logprobs,
            finish_reason=dialogue.finish_reason,
            text=dialogue.text,
            policy_version=spans[0][0] if spans else self.policy_version,
            versions=tuple(spans) if len(spans) > 1 else (),
            loss_mask=dialogue.loss_mask,
            routes=np.concatenate(routes) if routes else None,
            step_rewards=tuple(dialogue.step_rewards),
        )

    def _request(self, number: int, dialogue: Dialogue) -> Json:
        return self._params.request(
            [*dialogue.prompt.token_ids, *dialogue.completion_ids],
            number=number,
            seed=self._params.turn_seed(number, turn=len(dialogue.step_rewards)),
            max_tokens=dialogue.room,
            # Those of earlier turns are kept: an engine that takes over may choose others.
            routes_start=sum(map(len, dialogue.routes)),
        )


class EnvironmentDialogues:
    """Dialogues with environments."""

    def __init__(
        self,
        cfg: Config,
        tokenizer: "PreTrainedTokenizerBase",
        end_tokens: Sequence[int],
        client: RolloutClient,
    ) -> None:
        self._tokenizer, self._end_tokens, self._client = tokenizer, end_tokens, client
        self._pool = EnvironmentPool(cfg.environment)
        self.wait_ready, self.close = self._pool.wait_ready, self._pool.close

    def generation(
        self, prompts: Sequence[Prompt], params: SamplingParams, cfg: Config
    ) -> DialogueGeneration:
        """Dialogues for each prompt; their environments start at once."""
        return DialogueGeneration(
            prompts,
            params,
            environments=self._pool,
            turns=Turns.from_config(cfg, self._tokenizer, self._end_tokens),
            max_turns=cfg.environment.max_turns,
        )

    def generate(self, requests: SampleRequests) -> list[Sample]:
        """All samples of `requests`."""
        return self._client.generate(requests)
