"""A group: all samples of one prompt, while they are made."""

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise

from megatron_grpo.data.images import PromptSources, read_images
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample, first_seed
from megatron_grpo.engines.choice import CUT, Choice, Logprobs, Token, WeightVersion, npy_of
from megatron_grpo.engines.engine import Json
from megatron_grpo.engines.request import Request, SamplingParams, image_features
from megatron_grpo.engines.router import RequestRouter
from megatron_grpo.workers.tasks import gather_all
from parallel.words import counted


class Group(ABC):
    """The unit of request, score and save; made and used in the event loop."""

    partner = ""
    """The model's partner, in messages about failures."""

    def __init__(self, prompt: Prompt, params: SamplingParams, priority: int) -> None:
        """Sample i has the priority `priority` + i."""
        self.prompt, self.params, self.priority = prompt, params, priority
        self.engines: set[str] = set()
        """Addresses of the engines that have answered."""
        self._samples: dict[int, Sample] = {}
        """Finished samples by index."""

    @property
    def failures(self) -> list[str]:
        """One line for each sample whose partner failed."""
        return [
            f"prompt {self.prompt.index}, sample {each.sample_index}: {each.failure}"
            for each in self.so_far()
            if each.failure
        ]

    @abstractmethod
    async def sample(self, router: RequestRouter) -> list[Sample]:
        """Make all samples; cancelling this withdraws the requests, and ends all partners."""

    def so_far(self) -> list[Sample]:
        """Samples for a checkpoint, in order."""
        return [sample for _, sample in sorted(self._samples.items())]

    def restore(self, samples: Iterable[Sample]) -> None:
        """Take over the samples that an earlier run had `so_far`; call this before `sample`."""
        self._samples |= {sample.sample_index: sample for sample in samples}


class PartnerGroup(Group):
    """Sessions of the model with partners, each at its own pace. A partner is a process, which a
    checkpoint cannot hold: a resumed run begins unfinished and failed sessions anew."""

    def __init__(
        self, prompt: Prompt, params: SamplingParams, priority: int, features: Json | None = None
    ) -> None:
        """`features` are the `image_features` of a prompt that has images."""
        super().__init__(prompt, params, priority)
        self.features = features

    async def sample(self, router: RequestRouter) -> list[Sample]:
        async def play(index: int) -> None:
            self._samples[index] = await self._play(index, router)

        unfinished = {*range(self.params.num_generations)} - self._samples.keys()
        await gather_all([play(index) for index in sorted(unfinished)])
        self.features = None  # megabytes, and the group may wait long to be trained on
        return self.so_far()

    def restore(self, samples: Iterable[Sample]) -> None:
        # A run that ended since its partners fail is resumed once they are mended.
        super().restore(sample for sample in samples if sample.finish_reason != "failed")

    @abstractmethod
    async def _play(self, index: int, router: RequestRouter) -> Sample:
        """Play the session of one sample."""


class CompletionGroup(Group):
    """Completions of a single turn, each a request with its own seed: a long one neither holds up
    the others nor is lost with them."""

    def __init__(
        self, prompt: Prompt, params: SamplingParams, priority: int, features: Json | None = None
    ) -> None:
        """`features` are the `image_features` of a prompt that has images."""
        super().__init__(prompt, params, priority)
        first = first_seed(params.seed, params.series, params.position)
        token_ids = [*prompt.token_ids]
        self._requests = {
            index: Request(
                params.request(
                    token_ids,
                    seed=first + index,
                    max_tokens=params.max_completion_length,
                    routes_start=0,
                    features=features,
                ),
                priority + index,
                params.stop,
            )
            for index in range(params.num_generations)
        }
        """Open requests by sample index."""
        self._complete = asyncio.Event()
        self._failure: Exception | None = None

    @property
    def num_open(self) -> int:
        return len(self._requests)

    async def sample(self, router: RequestRouter) -> list[Sample]:
        """Have an engine complete the prompt: one engine gets all open requests."""
        if not self._requests:  # a checkpoint had all samples: nothing would set `_complete`
            return self.so_far()
        requests = [*self._requests.items()]
        for index, request in requests:
            request.answer.add_done_callback(partial(self._take, index))
        router.submit([request for _, request in requests])
        try:
            await self._complete.wait()
        finally:
            for request in self._requests.values():  # only if this was cancelled
                request.answer.cancel()
        if self._failure:
            raise self._failure
        return self.so_far()

    def so_far(self) -> list[Sample]:
        """Finished samples, and the tokens of aborted ones, with the `finish_reason` CUT."""
        begun = {index: request.begun for index, request in self._requests.items()}
        parts = {index: self._sample(index, part) for index, part in begun.items() if part}
        return [sample for _, sample in sorted((parts | self._samples).items())]

    def restore(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            if sample.finish_reason == CUT:
                self._requests[sample.sample_index].begun = _choice_of(sample)
            else:
                super().restore([sample])
                del self._requests[sample.sample_index]

    def _take(self, index: int, answer: "asyncio.Future[tuple[Choice, str]]") -> None:
        """Replace an answer by its sample at once: it takes over a hundred bytes per token."""
        if answer.cancelled():
            return
        choice, url = answer.result()
        try:
            self._samples[index] = self._sample(index, choice)
        except ValueError as error:  # `sample` raises it: asyncio only logs errors of callbacks
            self._failure = error
            self._complete.set()
            return
        del self._requests[index]
        self.engines.add(url)
        if not self._requests:
            self._complete.set()

    def _sample(self, index: int, choice: Choice) -> Sample:
        spans = choice.spans
        return Sample(
            prompt=self.prompt,
            sample_index=index,
            completion_ids=choice.token_ids,
            logprobs=choice.token_logprobs,
            finish_reason=choice.finish_reason,
            text=choice.text,
            policy_version=spans[0][0] if spans else self.params.policy_version,
            versions=tuple(spans) if len(spans) > 1 else (),
            temperature=self.params.own_temperature,
            routes=choice.routes if self.params.has_routes else None,
        )


def print_failures(groups: Iterable[Group]) -> None:
    """Print how many environments or agents have failed, and the first failure, if any."""
    failed = [(group.partner, line) for group in groups for line in group.failures]
    if failed:
        partner, first = failed[0]
        samples = counted(len(failed), "sample")
        line = f"the {partner} failed in {samples}, the first of them: {first}"
        print(line, file=sys.stderr)


async def features_of(prompts: Sequence[Prompt]) -> dict[PromptSources | None, Json]:
    """`image_features` of all prompts with images, by `Prompt.images`."""
    images = [prompt.images for prompt in prompts if prompt.images]
    if not images:
        return {}
    return await asyncio.to_thread(read_images, images, image_features)


async def sample_alone(
    router: RequestRouter, sampling: "Sequence[asyncio.Task[list[Sample]]]", policy_version: int
) -> list[Sample]:
    """Make all samples of these groups, in order, with nothing else at the engines; raises the
    first failure. After NoServingEngine, a call with the same tasks continues."""

    def has_failed() -> bool:
        ended = (task for task in sampling if task.done())
        return any(task.cancelled() or task.exception() for task in ended)

    for task in sampling:
        task.add_done_callback(lambda _: router.changed.give())
    await router.run_alone(
        policy_version, lambda: has_failed() or all(task.done() for task in sampling)
    )
    return [sample for task in sampling for sample in task.result()]


def _choice_of(sample: Sample) -> Choice:
    """Rebuild the answer that `_sample` made into a sample."""
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
