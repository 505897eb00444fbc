"""Deals the requests of a generation to the engines, and moves them to engines that have room.

Every engine gets as many requests. But those of one may turn out longer, or its GPUs slower: then
many of its requests wait for room in its cache when another engine has none left that wait. That
one takes over half of them. An engine starts with requests in their order, so the last have not
been started, and nothing is lost; a sample has the same seed wherever it is generated.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from typing import TypeVar

from megatron_grpo.rollout.assignment import Assignment
from megatron_grpo.rollout.engine import Engine, Json
from megatron_grpo.rollout.engine_error import EngineDown, EnginesOut, EngineStale
from megatron_grpo.rollout.fleet import Fleet
from megatron_grpo.rollout.generation import Requests

BALANCE_INTERVAL = 1.0

T = TypeVar("T")


class Dealing:
    """All open `requests`, dealt to the engines of the `fleet` that serve."""

    def __init__(
        self,
        fleet: Fleet,
        connect: Callable[[str], AbstractAsyncContextManager[Engine]],
        requests: Requests,
    ) -> None:
        self._fleet, self._connect, self._requests = fleet, connect, requests
        self._assignments: dict[str, list[Assignment]] = {}
        """Of each engine that has been given its share."""

    async def run(self) -> None:
        """Return when the engines have answered all requests but those of lost engines.

        Raises EnginesOut if no engine serves.
        """
        if not (serving := self._fleet.serving):
            raise EnginesOut(f"no rollout engine serves:\n{self._fleet.account()}")
        shares = equal_shares([*self._requests.open.items()], len(serving))
        try:
            async with asyncio.TaskGroup() as group:
                running = {
                    group.create_task(self._answer(url, dict(share), is_idle=True))
                    for url, share in zip(serving, shares, strict=True)
                }
                while running:
                    _, running = await asyncio.wait(running, timeout=BALANCE_INTERVAL)
                    running |= {
                        group.create_task(self._answer(url, requests, is_idle=False))
                        for url, requests in self._moved()
                    }
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _answer(self, url: str, requests: Mapping[int, Json], *, is_idle: bool) -> None:
        """Have an engine answer these; it is lost, or left out, if it cannot."""
        try:
            async with self._connect(url) as engine:
                version, take = self._requests.policy_version, self._requests.take
                assignment = Assignment(engine, requests, version, take)
                self._assignments.setdefault(url, []).append(assignment)
                try:
                    await assignment.answer(is_idle=is_idle)
                finally:
                    self._assignments[url].remove(assignment)
        except EngineStale as error:
            self._fleet.leave_out(url, str(error))
        except EngineDown as error:
            self._fleet.lose(url, str(error))

    def _moved(self) -> Iterator[tuple[str, Mapping[int, Json]]]:
        """Engines that take over requests, which are taken back from others."""
        if not self._requests.are_movable:
            return
        serving = set(self._fleet.serving)
        queues = {
            url: queue
            for url, assignments in self._assignments.items()
            if url in serving and (queue := queue_of(assignments)) is not None
        }
        for giver, taker, count in moves(queues):
            numbers = take_back(self._assignments[giver], count)
            for each in (*self._assignments[giver], *self._assignments[taker]):
                each.forget_queue()
            yield taker, {number: self._requests.open[number] for number in numbers}


def queue_of(assignments: Sequence[Assignment]) -> int | None:
    """Requests that an engine has not started yet; None if that is unknown."""
    queues = [assignment.queue for assignment in assignments]
    known = [queue for queue in queues if queue is not None]
    return max(known, default=0) if len(known) == len(queues) else None


def take_back(assignments: Sequence[Assignment], count: int) -> list[int]:
    """Take back the last `count` requests that an engine has; returns their numbers."""
    owners = {number: each for each in assignments for number in each.numbers}
    last = sorted(owners)[-count:]
    for number in last:
        owners[number].take_back(number)
    return last


def moves(queues: Mapping[str, int]) -> Iterator[tuple[str, str, int]]:
    """Who gives how many requests to whom, by the number that each has not started.

    Each engine that has none takes half of the longest queue.
    """
    left = {url: queue for url, queue in queues.items() if queue}
    for taker in queues.keys() - left.keys():
        giver = max(left, key=left.__getitem__, default=None)
        if giver is None or left[giver] < 2:
            return
        count = left[giver] // 2
        left[giver] -= count
        yield giver, taker, count


def equal_shares(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Split `items` into `count` contiguous parts whose sizes differ by at most one."""
    bounds = [len(items) * part // count for part in range(count + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]
