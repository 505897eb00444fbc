"""Dispatches the requests of a generation to the engines, and rebalances their queues.

Every engine gets the same number of requests. But the completions of one may turn out longer, or
its GPUs slower: then many of its requests still wait for room in its cache when none waits in
another engine. That engine takes over an equal part of the requests that were not started. So
hardly any token is lost, and a sample has the same seed wherever it is generated.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from typing import NoReturn, Protocol, TypeVar

from megatron_grpo.engines.choice import Choice
from megatron_grpo.engines.engine import Engine, Json
from megatron_grpo.engines.engine_queue import EngineQueue, KeepBegun
from megatron_grpo.engines.http import EngineDown, EngineStale, NoServingEngine
from megatron_grpo.engines.pool import EnginePool
from megatron_grpo.workers.tasks import gather_all, run_with, task_group

BALANCE_INTERVAL = 1.0

T = TypeVar("T")


class Requests(Protocol):
    """What a `RequestDispatcher` has the engines answer: `SampleRequests`, or those of several
    generations."""

    policy_version: int
    are_movable: bool
    """Whether a request that was not started may go to any engine: `take_answer` never waits."""

    @property
    def open(self) -> Mapping[int, Json]:
        """Unanswered requests, by number."""

    async def take_answer(self, number: int, choice: Choice, url: str) -> Json | None:
        """Process the answer to an open request from the engine at `url`; returns the follow-up."""


class RequestDispatcher:
    """Queues all open `requests` at the serving engines of the `pool`.

    With `stays`, it keeps running when they are answered, until `cut`: more may be added, and it
    may be held for a push of weights. With `keep`, answers are streamed, and `keep` gets what has
    arrived of a completion whose engine is lost. Raises NoServingEngine if no engine serves.
    """

    def __init__(
        self,
        pool: EnginePool,
        connect: Callable[[str], AbstractAsyncContextManager[Engine]],
        requests: Requests,
        *,
        stays: bool = False,
        keep: KeepBegun | None = None,
    ) -> None:
        if not (serving := pool.serving):
            raise NoServingEngine(f"no rollout engine serves:\n{pool.status_report()}")
        self._pool, self._connect, self._requests = pool, connect, requests
        self._stays, self._keep, self._is_held = stays, keep, False
        self._is_over = asyncio.Event()
        self._left: dict[int, Json] = {}
        """Unanswered requests of lost engines, until other engines get them."""
        shares = level_shares([*requests.open.items()], [0] * len(serving))
        self._lives: dict[str, tuple[str, int]] = {}
        self._queues: dict[str, EngineQueue] = {}
        """Of each engine that is not lost, by address."""
        for url, share in zip(serving, shares, strict=True):
            self._open_queue(url, dict(share))

    async def run(self) -> None:
        """Return when all requests are answered, except those of engines that were lost.

        With `stays`: when it is cut, or no engine is left.
        """
        async with run_with(self._balance()), task_group() as self._group:
            self._tasks = {url: self._group.create_task(self._serve(url)) for url in self._queues}

    async def hold(self, next_version: int) -> None:
        """Return when a push of that version may begin, through which engines keep their requests.

        Until `resume` the push alone decides which engines are lost.
        """
        self._is_held = True
        await gather_all(queue.hold(next_version) for queue in [*self._queues.values()])

    async def resume(self) -> None:
        """Continue after the push, with the engines that serve now."""
        serving = {url: self._pool.life(url) for url in self._pool.serving}
        gone = [url for url, life in self._lives.items() if serving.get(url) != life]
        tasks = [self._tasks[url] for url in gone]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # takes no more answers from them
        for queue in self._queues.values():
            queue.resume()
        self._is_held = False
        if self._is_over.is_set():
            return
        for url in serving.keys() - self._queues.keys():
            self._open_queue(url, {})
            self._tasks[url] = self._group.create_task(self._serve(url))
        self._redispatch()

    def forget(self, numbers: range) -> None:
        """Remove requests, and cancel them at their engines."""
        for number in [each for each in self._left if each in numbers]:
            del self._left[number]
        for queue in self._queues.values():
            queue.forget(numbers)

    def follow_up(self, number: int, request: Json, url: str) -> None:
        """Queue a request at the engine at `url`, or another one if that is lost."""
        if self._queues:
            least = min(self._queues.values(), key=lambda queue: len(queue.open))
            self._queues.get(url, least).enqueue({number: request})

    def add(self, requests: Mapping[int, Json], *, together: bool = False) -> None:
        """Queue more `requests`, with higher numbers; does nothing if no engine is left.

        With `together`, all go to the engine that has the fewest.
        """
        if together and self._queues:
            min(self._queues.values(), key=lambda queue: len(queue.open)).append(requests)
            return
        for queue, share in self._with_shares(requests):
            queue.append(share)

    def cut(self) -> None:
        """Have the engines give up their requests; `run` returns when they have."""
        for queue in self._queues.values():
            queue.cut()
        self._is_over.set()

    def _with_shares(
        self, requests: Mapping[int, Json]
    ) -> Iterator[tuple[EngineQueue, dict[int, Json]]]:
        queues = [*self._queues.values()]
        loads = [len(queue.open) for queue in queues]
        shares = level_shares([*requests.items()], loads) if queues else ()
        yield from zip(queues, map(dict, shares), strict=True)

    def _open_queue(self, url: str, requests: dict[int, Json]) -> None:
        version, take = self._requests.policy_version, self._requests.take_answer
        self._queues[url] = EngineQueue(requests, version, take, self._end_if_done, self._keep)
        self._lives[url] = self._pool.life(url)

    def _redispatch(self) -> None:
        """Queue what lost engines have left at the other engines."""
        if self._queues and not (self._is_held or self._is_over.is_set()):
            left, self._left = self._left, {}
            for queue, share in self._with_shares(left):
                queue.enqueue(share)
        self._end_if_done()

    async def _serve(self, url: str) -> None:
        """Have an engine answer its queue; mark it stale or dead if it cannot."""
        queue = self._queues[url]
        try:
            async with self._connect(url) as engine:
                await queue.answer(engine, self._is_over)
        except EngineStale as error:
            if not self._is_held:
                self._pool.mark_stale(url, str(error))
        except (EngineDown, TimeoutError) as error:  # late with an answer other than completions
            if not self._is_held:
                self._pool.mark_dead(url, str(error))
        finally:
            queue.has_started_or_failed.set()
            del self._queues[url], self._lives[url], self._tasks[url]
            if self._stays:  # else the caller dispatches what is open again
                self._left |= queue.open
        self._redispatch()

    def _end_if_done(self) -> None:
        has_work = self._stays or any(queue.open for queue in self._queues.values())
        if not (self._queues and has_work):
            self._is_over.set()

    async def _balance(self) -> NoReturn:
        while True:
            await asyncio.sleep(BALANCE_INTERVAL)
            if not self._requests.are_movable or self._is_held or self._is_over.is_set():
                continue
            each = self._queues.items()
            takers = [url for url, queue in each if queue.has_room]
            unstarted = {url: num for url, queue in each if (num := queue.num_unstarted)}
            for giver, taker, count in rebalance(unstarted, takers):
                self._queues[taker].enqueue(self._queues[giver].steal(count))


def rebalance(
    unstarted: Mapping[str, int], takers: Sequence[str]
) -> Iterator[tuple[str, str, int]]:
    """(giver, taker, count) of the moves after which every taker has the mean number of requests.

    `unstarted` is the number of unstarted requests by giver; `takers` have none. For example,
    {"a": 3, "b": 8} and ["c"] yield ("b", "c", 3).
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


def level_shares(items: Sequence[T], loads: Sequence[int]) -> list[Sequence[T]]:
    """Split `items` into contiguous parts, one for each of `loads`, that level them out.

    Each load with its part is about as large as any other that gets a part: 5 items and loads of 3
    and 0 yield parts of 1 and 4. So a slow engine, which has more left, gets less.
    """
    sizes, heap = [0] * len(loads), [(load, part) for part, load in enumerate(loads)]
    heapify(heap)
    for _ in items:
        load, part = heap[0]
        heapreplace(heap, (load + 1, part))
        sizes[part] += 1
    return [items[start:end] for start, end in pairwise([0, *accumulate(sizes)])]
