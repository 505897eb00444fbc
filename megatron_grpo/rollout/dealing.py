"""Deals the requests of a generation to the engines, and moves some where none waits.

Every engine gets as many requests. But those of one may turn out longer, or its GPUs slower: then
many of them still wait for room in its cache when none waits in another engine. That one takes over
its part of those that have not been started. So hardly any token is lost, and a sample has the same
seed wherever it is generated.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from typing import NoReturn, TypeVar

from megatron_grpo.rollout.assignment import Assignment
from megatron_grpo.rollout.engine import Engine
from megatron_grpo.rollout.engine_error import EngineDown, EnginesOut, EngineStale
from megatron_grpo.rollout.fleet import Fleet
from megatron_grpo.rollout.generation import Requests
from megatron_grpo.rollout.tasks import beside, together

BALANCE_INTERVAL = 1.0

T = TypeVar("T")


class Dealing:
    """All open `requests`, dealt to the engines of the `fleet` that serve.

    Raises EnginesOut if none does.
    """

    def __init__(
        self,
        fleet: Fleet,
        connect: Callable[[str], AbstractAsyncContextManager[Engine]],
        requests: Requests,
    ) -> None:
        if not (serving := fleet.serving):
            raise EnginesOut(f"no rollout engine serves:\n{fleet.account()}")
        self._fleet, self._connect, self._are_movable = fleet, connect, requests.are_movable
        self._is_over = asyncio.Event()
        shares = equal_shares([*requests.open.items()], len(serving))
        version, take = requests.policy_version, requests.take
        self._assignments = {
            url: Assignment(dict(share), version, take, self._check_over)
            for url, share in zip(serving, shares, strict=True)
        }
        """Of each engine that is not lost."""

    async def run(self) -> None:
        """Return when the engines have answered all requests but those of lost engines."""
        async with beside(self._balance()):
            await together(map(self._serve, [*self._assignments]))

    async def _serve(self, url: str) -> None:
        """Have an engine answer what it is assigned; it is lost, or left out, if it cannot."""
        try:
            async with self._connect(url) as engine:
                await self._assignments[url].answer(engine, self._is_over)
        except EngineStale as error:
            self._fleet.leave_out(url, str(error))
        except (EngineDown, TimeoutError) as error:  # late with an answer other than completions
            self._fleet.lose(url, str(error))
        del self._assignments[url]
        self._check_over()

    def _check_over(self) -> None:
        if not any(assignment.open for assignment in self._assignments.values()):
            self._is_over.set()

    async def _balance(self) -> NoReturn:
        while True:
            await asyncio.sleep(BALANCE_INTERVAL)
            if self._are_movable:
                self._move()

    def _move(self) -> None:
        each = self._assignments.items()
        takers = [url for url, assignment in each if assignment.has_room]
        unstarted = {url: num for url, assignment in each if (num := assignment.num_unstarted)}
        for giver, taker, count in moves(unstarted, takers):
            self._assignments[taker].give(self._assignments[giver].take_back(count))


def moves(unstarted: Mapping[str, int], takers: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """Who gives how many requests to whom, so that each of these engines has about as many.

    `unstarted` are the requests that those who give have not started; `takers` have none.
    """
    left = dict(unstarted)
    fair = sum(left.values()) // (len(left) + len(takers) or 1)
    for taker in takers:
        wanted = fair
        for giver in sorted(left, key=left.__getitem__, reverse=True):
            count = min(wanted, left[giver] - fair)
            if count > 0:
                left[giver] -= count
                wanted -= count
                yield giver, taker, count


def equal_shares(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Split `items` into `count` contiguous parts whose sizes differ by at most one."""
    bounds = [len(items) * part // count for part in range(count + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]
