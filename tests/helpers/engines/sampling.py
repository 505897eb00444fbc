"""Completions requested from engines by a test's thread, as rank 0 requests them."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample
from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.engines.group import CompletionGroup, Group, features_of, sample_alone
from megatron_grpo.engines.request import SamplingParams
from megatron_grpo.engines.router import RequestRouter
from megatron_grpo.rollout.runner import PRIORITIES
from megatron_grpo.workers.event_loop import EventLoop

NewGroup = Callable[[Prompt, SamplingParams, int], Group]


@cache
def event_loop() -> EventLoop:
    """The event loop that all tests of this process share."""
    return EventLoop()


class Completions:
    """One group of completions for each prompt, in the generation `number`."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        number: int = 0,
        new_group: NewGroup | None = None,
    ) -> None:
        self.prompts, self.params, self._number = prompts, params, number
        self._new_group = new_group
        self.groups: list[Any] = []
        self.sampling: list[asyncio.Task[list[Sample]]] = []

    async def begin(self, router: RequestRouter) -> None:
        """Submit all groups, unless they are submitted already."""
        if self.sampling:
            return
        features = await features_of(self.prompts)
        for position, prompt in enumerate(self.prompts):
            params = replace(self.params, position=self.params.position + position)
            priority = self._number * PRIORITIES + position * params.num_generations
            self.groups.append(
                self._new_group(prompt, params, priority)
                if self._new_group
                else CompletionGroup(prompt, params, priority, features.get(prompt.images))
            )
        self.sampling = [asyncio.create_task(group.sample(router)) for group in self.groups]

    @property
    def num_open(self) -> int:
        """Number of samples that are not complete."""
        return sum(group.num_open for group in self.groups)

    @property
    def engines(self) -> set[str]:
        """URLs of the engines that have answered."""
        return set().union(*(group.engines for group in self.groups))

    def so_far(self) -> list[Sample]:
        """All samples, complete or partial."""
        return [sample for group in self.groups for sample in group.so_far()]

    def samples(self) -> list[Sample]:
        """All samples; every one must be complete."""
        return [sample for task in self.sampling for sample in task.result()]


class Router:
    """A `RequestRouter` with methods that a test's thread can call."""

    def __init__(self, client: RolloutClient, decode: Any, *, streams: bool = True) -> None:
        self.client, self.loop = client, client.loop
        self.router = RequestRouter(client, decode, streams=streams)
        self._submitted: list[Completions] = []

    def submit(self, completions: Completions) -> Future[None]:
        """A future that is done once all completions are, or has the router's error."""
        self.loop.call(completions.begin(self.router))
        self._submitted.append(completions)
        return asyncio.run_coroutine_threadsafe(self._until(completions), self.loop._loop)

    def generate(self, completions: Completions) -> list[Sample]:
        """Samples of all completions; the router must be running."""
        self.submit(completions).result()
        return completions.samples()

    def generate_alone(self, completions: Completions) -> list[Sample]:
        """Sample while the engines do nothing else, as in an evaluation; may be called again after
        NoServingEngine."""

        async def sample() -> list[Sample]:
            await completions.begin(self.router)
            return await sample_alone(
                self.router, completions.sampling, completions.params.policy_version
            )

        return self.loop.call(sample())

    def resume(self, policy_version: int) -> None:
        self.loop.call(self.router.resume(policy_version))

    def pause(self, next_version: int) -> None:
        self.loop.call(self.router.pause(next_version))

    def abort(self) -> None:
        self.loop.call(self.router.abort())

    @contextmanager
    def aborted(self) -> Iterator[None]:
        """Abort requests for the block, as a checkpoint does."""
        was_running = self.router.is_running
        self.abort()
        yield
        if was_running:
            self.resume(self.router.policy_version)

    def close(self) -> None:
        async def close() -> None:
            await self.router.close()
            for task in [task for completions in self._submitted for task in completions.sampling]:
                task.cancel()

        self.loop.call(close())

    async def _until(self, completions: Completions) -> None:
        for task in completions.sampling:
            task.add_done_callback(lambda _: self.router.changed.give())
        await self.router.until(lambda: all(task.done() for task in completions.sampling))


@contextmanager
def routing(client: RolloutClient, decode: Any = str, *, streams: bool = True) -> Iterator[Router]:
    """A router of the client, closed at the end of the block."""
    router = Router(client, decode, streams=streams)
    try:
        yield router
    finally:
        router.close()


def generate(client: RolloutClient, completions: Completions) -> list[Sample]:
    """`Router.generate_alone` with one router per client."""
    router = _ROUTERS.setdefault(client, Router(client, str, streams=False))
    return router.generate_alone(completions)


_ROUTERS: WeakKeyDictionary[RolloutClient, Router] = WeakKeyDictionary()
