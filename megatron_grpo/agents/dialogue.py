"""Dialogues with environments: the model's partner, turn by turn.

An environment is a class in a user's file:

    class Guessing:
        def reset(self, prompt: str, **columns) -> str | None:
            ...  # `columns` of the data row; a returned text is appended to the prompt
        def step(self, text: str) -> tuple[str, float, bool]:
            ...  # the model's turn -> observation, reward, done

`step` may also take `token_ids` and `finish_reason` of the turn (`stop`, or `length` if it was cut
off), and `tokens_left`, the number of tokens that observations and further turns may have together.

A classmethod `load(**arguments)`, if there is one, is called once, before any instance is made.

Every sample has its own instance, made from `environment.arguments`, in its own process: a fork of
the process that has loaded the file. A call that hangs, dies or uses too much memory is killed
without affecting other samples, and a step that waits blocks no other. This is no sandbox.

If an environment fails or is late, its sample has failed: the reward is NaN, never zero.

Observations become tokens between the model's turns, and do not enter the loss.

Elsewhere: TRL's `environment_factory` (a text returned by `reset` is appended to the last user
message), verl's agent loop with an interaction, ms-swift's `multi_turn_scheduler` with a gym
environment.
"""

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_grpo.agents.fork_pool import ForkPool, InstanceFailed, Step
from megatron_grpo.agents.turns import ObservationTemplate
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Heard, Sample, extend_spans
from megatron_grpo.engines.choice import Choice
from megatron_grpo.engines.engine import Json
from megatron_grpo.engines.group import PartnerGroup
from megatron_grpo.engines.request import Request, SamplingParams
from megatron_grpo.engines.router import RequestRouter
from parallel.words import counted


@dataclass
class Dialogue:
    """One sample in progress: turns of the model with observations between them."""

    prompt: Prompt
    sample_index: int
    room: int
    """Number of tokens that may still be appended, sampled or observed."""
    # Arrays as in a `Sample`:
    completion_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    loss_mask: "array[int]" = field(default_factory=lambda: array("b"))
    text: str = ""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(version of the weights, number of tokens) of each part; an observation has the version of
    the turn before it."""
    routes: list[np.ndarray] = field(default_factory=list)
    """New routes of each turn; end to end they cover all tokens but the last."""
    step_rewards: list[tuple[int, float]] = field(default_factory=list)
    heard: list[Heard] = field(default_factory=lambda: [Heard((), ())])
    """Observation before each turn, the next one included."""
    finish_reason: str = ""
    """Empty until the dialogue ends."""
    failure: str = ""
    _is_cut: bool = False
    """Whether the last turn has no end token."""

    def add_turn(self, choice: Choice) -> None:
        self._append(choice.token_ids, choice.token_logprobs, True)
        for version, num_tokens in choice.spans:
            extend_spans(self.spans, version, num_tokens)
        self.text += choice.text
        self._is_cut = choice.finish_reason == "length"

    def add_first_observation(self, observation: str | None, template: ObservationTemplate) -> None:
        """Append the first observation, if any, to the prompt; it takes from `room`."""
        if observation is None:
            return
        longer = template.with_first_observation(self.prompt, observation)
        room = self.room - (len(longer.token_ids) - len(self.prompt.token_ids))
        if room < 1:
            raise InstanceFailed(
                f"its first observation is {counted(1 - room, 'token')} too long for "
                "rollout.max_completion_length, which includes observations: raise it"
            )
        self.prompt, self.room = longer, room

    def add_step(self, step: Step, template: ObservationTemplate, max_turns: int) -> None:
        """Append the observation of an environment step, or end the dialogue."""
        self.step_rewards.append((len(self.completion_ids) - 1, step.reward))
        if self._is_cut:
            self.finish_reason = "length"
        elif step.done:
            self.finish_reason = "stop"
        elif len(self.step_rewards) == max_turns:
            self.finish_reason = "max_turns"
        else:
            tokens, text = template.encode_observation(step.observation, self.completion_ids[-1])
            if len(tokens) >= self.room:  # not `>`: the model's next turn needs at least one token
                self.finish_reason = "length"
            else:
                self._append(tokens, [0.0] * len(tokens), False)
                extend_spans(self.spans, self.spans[-1][0], len(tokens))
                self.text += text
                self.heard.append(Heard(("environment",), (), (step.observation,)))

    def to_sample(self, params: SamplingParams) -> Sample:
        """The sample of an ended dialogue; the version of `params` counts if it failed before a
        turn."""
        spans, routes = self.spans, self.routes
        return Sample(
            prompt=self.prompt,
            sample_index=self.sample_index,
            completion_ids=self.completion_ids,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            text=self.text,
            policy_version=spans[0][0] if spans else params.policy_version,
            versions=tuple(spans) if len(spans) > 1 else (),
            temperature=params.own_temperature,
            loss_mask=self.loss_mask,
            routes=np.concatenate(routes) if routes else None,
            step_rewards=tuple(self.step_rewards),
            heard=tuple(self.heard[: len(self.step_rewards)]),
            failure=self.failure,
        )

    def _append(self, tokens: Sequence[int], logprobs: Sequence[float], is_sampled: bool) -> None:
        self.completion_ids.extend(tokens)
        self.logprobs.extend(logprobs)
        self.loss_mask.extend([is_sampled] * len(tokens))
        self.room -= len(tokens)


class DialogueGroup(PartnerGroup):
    """Dialogues of one prompt with environments.

    Each turn is a request with all tokens so far; the engine has cached their prefix. Seeds do not
    depend on timing, but engines batch turns as they arrive: sums round differently from run to
    run, and some tokens may differ.
    """

    partner = "environment"

    def __init__(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        features: Json | None = None,
        *,
        environments: ForkPool,
        template: ObservationTemplate,
        max_turns: int,
    ) -> None:
        super().__init__(prompt, params, priority, features)
        self._environments, self._template, self._max_turns = environments, template, max_turns

    async def _play(self, index: int, router: RequestRouter) -> Sample:
        params = self.params
        dialogue = Dialogue(self.prompt, index, params.max_completion_length)
        try:
            await self._converse(dialogue, router)
        except InstanceFailed as failure:
            has_begun = bool(dialogue.completion_ids)
            call = f"turn {len(dialogue.step_rewards) + 1}" if has_begun else "reset"
            dialogue.finish_reason, dialogue.failure = "failed", f"{call}: {failure}"
        return dialogue.to_sample(params)

    async def _converse(self, dialogue: Dialogue, router: RequestRouter) -> None:
        """Have the model and a new environment take turns until the dialogue ends."""
        url, prompt, params = "", dialogue.prompt, self.params
        environment = self._environments.new_instance()
        try:
            own_seed = params.turn_seed(dialogue.sample_index, turn=-1)
            first = await asyncio.wrap_future(environment.begin(prompt.text, prompt.row, own_seed))
            dialogue.add_first_observation(first, self._template)
            while not dialogue.finish_reason:
                request = self._request(dialogue, url)
                router.submit([request])
                choice, url = await request.answer
                self.engines.add(url)
                # Not "if the choice has routes": a run's engines return them to evaluations, too.
                if params.has_routes:
                    dialogue.routes.append(choice.routes)
                dialogue.add_turn(choice)
                step = environment.step(
                    choice.text,
                    token_ids=choice.token_ids,
                    finish_reason=choice.finish_reason,
                    tokens_left=dialogue.room,
                )
                answer = Step(*await asyncio.wrap_future(step))
                dialogue.add_step(answer, self._template, self._max_turns)
        finally:
            environment.end()

    def _request(self, dialogue: Dialogue, url: str) -> Request:
        """Request of the next turn, preferably to the engine at `url`."""
        params = self.params
        body = params.request(
            [*dialogue.prompt.token_ids, *dialogue.completion_ids],
            seed=params.turn_seed(dialogue.sample_index, turn=len(dialogue.step_rewards)),
            max_tokens=dialogue.room,
            # Expert choices of earlier tokens are kept, not asked for again: another engine's
            # router may choose other experts.
            routes_start=sum(map(len, dialogue.routes)),
            features=self.features,
        )
        return Request(body, self.priority + dialogue.sample_index, params.stop, url)
