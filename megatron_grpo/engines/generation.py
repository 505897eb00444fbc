"""The requests for the samples of a generation; each is answered once, by any engine."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

from megatron_grpo.data.images import PromptSources, read_images
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample, first_seed
from megatron_grpo.engines.choice import CUT, Choice, Logprobs, Token, WeightVersion, npy_of
from megatron_grpo.engines.engine import Json
from megatron_grpo.engines.sampling_params import SamplingParams, image_features

GroupCallback = Callable[[list[Sample]], None]
"""Called with all samples of a prompt when the last of them is complete."""


class SampleRequests(ABC):
    """The requests for the samples of a generation, by number.

    A number has one request at a time. In a dialogue, the answer to it goes to an environment or an
    agent: the number is `waiting` until that asks for the next turn.
    """

    are_movable = False
    """Whether an engine may leave a request to another one: not a turn of a dialogue, as the engine
    that answered the last one has the dialogue cached."""
    answerer = ""
    """What the model talks to, in messages about failures."""

    def __init__(self, params: SamplingParams) -> None:
        self.policy_version, self.stop = params.policy_version, params.stop
        self.engines: set[str] = set()
        """Addresses of the engines that have answered."""
        self.begun: dict[int, Choice] = {}
        """What was sampled for open requests before they were cut."""
        self._params = params
        self._on_group: GroupCallback | None = None

    @property
    @abstractmethod
    def open(self) -> dict[int, Json]:
        """The unanswered requests."""

    def open_request(self, number: int) -> Json | None:
        """The unanswered request of `number`, None if it has none."""
        return self.open.get(number)

    @property
    def waiting(self) -> Iterable[int]:
        """The numbers that wait for an environment or agent."""
        return ()

    def is_waiting(self, number: int) -> bool:
        """Whether `number` is in `waiting`."""
        return False

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether no number is open or waiting."""

    @property
    def failures(self) -> list[str]:
        """One line per dialogue that has failed."""
        return []

    @abstractmethod
    def add_answer(self, number: int, choice: Choice, url: str) -> None:
        """Process the answer of the engine at `url`."""

    async def next_request(self, number: int) -> Json | None:
        """Wait until `number` has its next request, and return it; None at the end."""
        return None

    async def take_answer(self, number: int, choice: Choice, url: str) -> Json | None:
        """`add_answer`; returns the `next_request`."""
        self.add_answer(number, choice, url)
        return await self.next_request(number)

    @abstractmethod
    def samples(self) -> list[Sample]:
        """All samples, in the order of the prompts, once `is_complete`."""

    def print_failures(self) -> None:
        """Print the number of dialogues that failed, and the first failure, if any."""
        if failures := self.failures:
            line = f"the {self.answerer} failed in {len(failures)} samples, the first of them: "
            print(line + failures[0], file=sys.stderr)

    def abandon(self) -> None:  # noqa: B027 - only dialogues do something
        """End all dialogues that have not ended."""

    def on_group_complete(self, callback: GroupCallback) -> None:
        """Have `callback` called for each prompt, though maybe not if its agents end last."""
        self._on_group = callback


class CompletionRequests(SampleRequests):
    """Completions of each prompt by `params`: the open requests and the samples received.

    Each sample is a request of its own, so that a long answer does not wait for the others of its
    prompt, nor is lost with them. Requests of one prompt have successive numbers: most go to one
    engine, which has the prompt cached. Each sample has its own seed (`first_seed`), independent of
    when and where it is generated.
    """

    are_movable = True

    def __init__(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        features: Mapping[PromptSources | None, Json] | None = None,
    ) -> None:
        """`features` are the `image_features` of the prompts that have images; None: they are
        computed here."""
        super().__init__(params)
        self._prompts = prompts
        self._samples: dict[int, Sample] = {}
        self._open: dict[int, Json] = {}
        """By the number of the sample."""
        if features is None:
            features = read_images((each.images for each in prompts), image_features)
        for position, prompt in enumerate(prompts):
            first = first_seed(params.seed, params.series, params.first_position + position)
            token_ids = [*prompt.token_ids]
            for index in range(params.num_generations):
                number = position * params.num_generations + index
                self._open[number] = params.request(
                    token_ids,
                    number=number,
                    seed=first + index,
                    max_tokens=params.max_completion_length,
                    routes_start=0,
                    features=features.get(prompt.images),
                )

    @property
    def open(self) -> dict[int, Json]:
        """The unanswered requests, by the number of their sample."""
        return self._open

    @property
    def is_complete(self) -> bool:
        """Whether every request is answered."""
        return not self.open

    def add_answer(self, number: int, choice: Choice, url: str) -> None:
        """Turn the answer of the engine at `url` into a sample.

        The answer itself, over a hundred bytes per token, is not kept.
        """
        self._samples[number] = self._sample(number, choice)
        del self._open[number]
        self.begun.pop(number, None)
        self.engines.add(url)
        size = self._params.num_generations
        first = number - number % size
        group = [self._samples[n] for n in range(first, first + size) if n in self._samples]
        if self._on_group and len(group) == size:
            self._on_group(group)

    def samples(self) -> list[Sample]:
        """All samples, in the order of the prompts, once no request is open."""
        assert not self.open, f"{len(self.open)} requests are open"
        return [sample for _, sample in sorted(self._samples.items())]

    def so_far(self) -> list[Sample]:
        """The samples received, and of cut ones what was sampled so far, with the `finish_reason`
        CUT. May be called from any thread."""
        begun = self.begun.copy()  # first: one that is answered now is still in here
        parts = {number: self._sample(number, choice) for number, choice in begun.items()}
        return [sample for _, sample in sorted((parts | self._samples).items())]

    def restore(self, samples: Iterable[Sample]) -> None:
        """Take over the samples that another generation of the same prompts had `so_far`."""
        positions = {prompt.index: position for position, prompt in enumerate(self._prompts)}
        for sample in samples:
            position = positions[sample.prompt.index]
            number = position * self._params.num_generations + sample.sample_index
            if sample.finish_reason == CUT:
                self.begun[number] = _choice_of(sample)
            else:
                self._samples[number] = sample
                del self._open[number]

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
            routes=choice.routes if self._params.has_routes else None,
        )


def _choice_of(sample: Sample) -> Choice:
    """The answer that was made into a sample."""
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
        routed_experts=None if sample.routes is None else npy_of(sample.routes),
    )
