"""The requests of one generation; each is answered once, by any engine."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

from megatron_grpo.data.prompts import Prompt, images_by_prompt
from megatron_grpo.data.samples import Sample, first_seed
from megatron_grpo.engines.choice import CUT, Choice, Logprobs, Token, WeightVersion, npy_of
from megatron_grpo.engines.engine import Json
from megatron_grpo.engines.sampling_params import SamplingParams, image_features

TakeGroup = Callable[[list[Sample]], None]
"""Called with all samples of a prompt when the last of them is complete."""


class Requests(Protocol):
    """Requests that a `RolloutClient` has the engines answer."""

    policy_version: int
    are_movable: bool
    """Whether a request that was not started may go to any engine: `take_answer` never waits."""

    @property
    def open(self) -> Mapping[int, Json]:
        """Unanswered requests, by number."""

    async def wait_for_environments(self) -> None:
        """Wait until `open` holds everything that is left to do."""

    async def take_answer(self, number: int, choice: Choice, url: str) -> Json | None:
        """Process the answer to an open request from the engine at `url`; returns the follow-up."""


class SampleRequests(Requests, Protocol):
    """Requests for samples."""

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to ask for or to wait for."""

    def samples(self) -> list[Sample]:
        """All samples, in the order of the prompts, once that is so."""


class CutRequests(SampleRequests, Protocol):
    """Those that pushes of weights may cut; see `InFlight`."""

    begun: dict[int, Choice]
    """What was sampled of open ones until they were cut."""
    stop: Sequence[str]
    """The strings that end a completion."""

    @property
    def waiting(self) -> Iterable[int]:
        """Numbers of those that wait for their environments before there is a next request."""

    def is_waiting(self, number: int) -> bool:
        """Whether a number is among the `waiting`."""

    def take(self, number: int, choice: Choice, url: str) -> None:
        """Take the answer to an open request, after which it may be `waiting`."""

    async def next_request(self, number: int) -> Json | None:
        """Wait for what it waits for; returns the next request, None at its end."""

    def tell_groups(self, take_group: TakeGroup) -> None:
        """Have this called for each prompt, but maybe not for those whose agents end last."""


class Generation:
    """Samples of each prompt by `params`: the open requests and the samples received.

    Each sample is a request of its own, so that a long answer does not wait for the others of its
    prompt, nor is lost with them. Requests of one prompt have successive numbers: most go to one
    engine, which has the prompt cached. Each sample has its own seed (`first_seed`), independent of
    when and where it is generated.
    """

    are_movable = True
    waiting: Iterable[int] = ()

    def __init__(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        features: Mapping[int, Json] | None = None,
    ) -> None:
        """`features` are the `image_features` of the prompts that have images, by index; None: they
        are made here."""
        self.policy_version = params.policy_version
        self.engines: set[str] = set()
        """Addresses of the engines that have answered."""
        self.begun: dict[int, Choice] = {}
        """What was sampled of open ones until they were cut."""
        self._prompts, self._params, self.stop = prompts, params, params.stop
        self._samples: dict[int, Sample] = {}
        self._take_group: TakeGroup | None = None
        self.open: dict[int, Json] = {}
        """The unanswered requests, by the number of their sample."""
        if features is None:
            features = images_by_prompt(prompts, image_features)
        for position, prompt in enumerate(prompts):
            first = first_seed(params.seed, params.series, params.first_position + position)
            token_ids = [*prompt.token_ids]
            for index in range(params.num_generations):
                number = position * params.num_generations + index
                self.open[number] = params.request(
                    token_ids,
                    number=number,
                    seed=first + index,
                    max_tokens=params.max_completion_length,
                    routes_start=0,
                    features=features.get(prompt.index),
                )

    async def wait_for_environments(self) -> None:
        """Nothing to wait for."""

    @property
    def is_complete(self) -> bool:
        """Whether every request is answered."""
        return not self.open

    async def take_answer(self, number: int, choice: Choice, url: str) -> None:
        """`take` it; there is no follow-up request."""
        self.take(number, choice, url)

    def is_waiting(self, number: int) -> bool:
        """No: a sample is one request."""
        return False

    async def next_request(self, number: int) -> None:
        """None: a sample is one request."""

    def take(self, number: int, choice: Choice, url: str) -> None:
        """Turn the answer of the engine at `url` into a sample.

        The answer itself, over a hundred bytes per token, is not kept.
        """
        self._samples[number] = self._sample(number, choice)
        del self.open[number]
        self.begun.pop(number, None)
        self.engines.add(url)
        size = self._params.num_generations
        first = number - number % size
        group = [self._samples[n] for n in range(first, first + size) if n in self._samples]
        if self._take_group and len(group) == size:
            self._take_group(group)

    def tell_groups(self, take_group: TakeGroup) -> None:
        """Have this called with all samples of a prompt when the last of them is answered."""
        self._take_group = take_group

    def samples(self) -> list[Sample]:
        """All samples, in the order of the prompts, once no request is open."""
        assert not self.open, f"{len(self.open)} requests are open"
        return [sample for _, sample in sorted(self._samples.items())]

    def so_far(self) -> list[Sample]:
        """The samples received, and what was sampled of others until they were cut: their
        `finish_reason` is CUT. Any thread may ask."""
        begun = self.begun.copy()  # first: one that is answered now is still in here
        parts = {number: self._sample(number, choice) for number, choice in begun.items()}
        return [sample for _, sample in sorted((parts | self._samples).items())]

    def go_on(self, samples: Iterable[Sample]) -> None:
        """Take over what another generation of the same prompts had `so_far`."""
        positions = {prompt.index: position for position, prompt in enumerate(self._prompts)}
        for sample in samples:
            position = positions[sample.prompt.index]
            number = position * self._params.num_generations + sample.sample_index
            if sample.finish_reason == CUT:
                self.begun[number] = _choice_of(sample)
            else:
                self._samples[number] = sample
                del self.open[number]

    def _sample(self, number: int, choice: Choice) -> Sample:
        position, sample_index = divmod(number, self._params.num_generations)
        spans = choice.spans
        return Sample(
            prompt=self._prompts[position],
            sample_index=sample_index,
            completion_ids=choice.token_ids,
            logprobs=choice.token_logprobs,
            finish_reason=choice.finish_reason,
            text=choice.text,
            policy_version=spans[0][0] if spans else self.policy_version,
            versions=tuple(spans) if len(spans) > 1 else (),
            routed_experts=choice.routes if self._params.router_replay else None,
        )


def _choice_of(sample: Sample) -> Choice:
    """What an engine had answered."""
    bounds = pairwise([0, *accumulate(count for _, count in sample.spans)])
    return Choice(
        token_ids=[*sample.completion_ids],
        logprobs=Logprobs([Token(logprob) for logprob in sample.logprobs]),
        finish_reason=sample.finish_reason,
        text=sample.text,
        weight_versions=[
            WeightVersion(str(version), start, end)
            for (version, _), (start, end) in zip(sample.spans, bounds, strict=True)
        ],
        routed_experts=None if sample.routed_experts is None else npy_of(sample.routed_experts),
    )
