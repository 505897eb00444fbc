"""Dispatches the requests of a generation to the engines, and rebalances their queues.

Every engine gets the same number of requests. But the completions of one may turn out longer, or
its GPUs slower: then many of its requests still wait for room in its cache when none waits in
another engine. That engine takes over an equal part of the requests that were not started. So
hardly any token is lost, and a sample has the same seed wherever it is generated.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from typing import NoReturn, TypeVar

from megatron_grpo.engines.choice import CUT, Choice
from megatron_grpo.engines.engine import Counts, Engine, Json
from megatron_grpo.engines.generation import Requests
from megatron_grpo.engines.http import EngineDown, EngineError, EngineStale, NoServingEngine
from megatron_grpo.engines.pool import EnginePool
from megatron_grpo.workers.tasks import gather_all, run_with, task_group

POLL_INTERVAL = 0.05
RESUME_SECONDS = 2.0
RECENT_SECONDS = 3.0
"""Within which an engine that is well tells its counts again."""

TakeAnswer = Callable[[int, Choice, str], Awaitable[Json | None]]
"""Processes the answer to a request, by number, from the engine at an address; returns a follow-up
request, if there is one. Of a request that was cut, the answer is what was sampled until then."""


class EngineQueue:
    """The requests of one engine, by number, which is also their priority.

    `ended` is called when a request is answered or was stolen.
    """

    def __init__(
        self,
        requests: Mapping[int, Json],
        policy_version: int,
        take: TakeAnswer,
        ended: Callable[[], None],
    ) -> None:
        self.open = dict(requests)
        """Requests that are not answered, or their follow-ups."""
        self._policy_version, self._take_answer, self._ended = policy_version, take, ended
        self._asks: dict[int, asyncio.Task[None]] = {}
        self._num_at_engine = self._num_arrived = self._num_answered = 0
        self._is_sending = self._is_cut = False
        self._is_working = False
        """Whether the engine has started, and has not failed."""
        self._num_initial = len(requests)
        """Requests with which it started, less those that were stolen."""
        self._has_taken_over = False
        self._first = self._latest = Counts()
        """The engine's counts before it started, and the latest."""
        self._noted_at = -math.inf
        self._num_notes = 0
        self._change = 0, 0.0
        """`_num_notes` and `_latest.generated` when the queue last changed."""

    async def answer(self, engine: Engine, is_over: asyncio.Event) -> None:
        """Have the engine answer all requests, with those enqueued before `is_over`.

        Each answer is passed to `take` as it arrives, and a follow-up request is sent next. While
        `take` is processing every answer, the engine has nothing to do and does not count as hung.
        It must hold complete weights of the version at the start and those of the same push at the
        end, so that it held them throughout.
        """
        self._engine = engine
        async with run_with(engine.watch(self._progress, self._note)):
            push = await engine.push_of(self._policy_version)
            self._first = self._latest = await engine.counts()
            async with task_group() as self._group:
                try:
                    if self.open:
                        await self._start()
                    self._is_working = self._is_sending = True
                    self._note_change()
                    await is_over.wait()
                    await self._wait_for_cut()
                finally:
                    self._is_working = self._is_sending = False
            if await engine.held_push() != push:
                raise EngineError(
                    f"rollout engine {engine.url} was given new weights while it generated: is "
                    "another trainer using it?"
                )

    @property
    def has_room(self) -> bool:
        """Whether the engine has started, and no request waits."""
        is_known = self._is_known if self.open else self._is_recent
        return self._is_working and is_known and self._latest.waiting == 0

    @property
    def num_unstarted(self) -> int:
        """Number of requests that the engine has not started: those with the highest numbers.

        0 if that is not known, or if requests were enqueued later: these may have lower numbers
        than some that were started. vLLM's `waiting` includes requests that it has preempted, which
        would lose their tokens: hence the minimum with requests without a first token.
        """
        if not self._is_working or not self._is_known or self._has_taken_over:
            return 0
        unstarted = self._num_initial - (self._latest.started - self._first.started)
        return max(0, int(min(unstarted, self._latest.waiting, len(self.open))))

    def enqueue(self, requests: Mapping[int, Json]) -> None:
        """Have the engine answer these, too: they come from another engine's queue."""
        self._has_taken_over = True
        self.append(requests)

    def append(self, requests: Mapping[int, Json]) -> None:
        """Have the engine answer these, too: their numbers are higher than those that it has.

        One that has not started gets them when it does; one that has failed leaves them `open`.
        """
        self._num_initial += len(requests)
        if self._is_sending:
            self._send(requests)
            self._note_change()
        else:
            self.open |= requests

    def cut(self) -> None:
        """Have the engine give up its requests, once `is_over` is set; they stay `open`."""
        self._is_cut = True

    def steal(self, count: int) -> dict[int, Json]:
        """Remove the last `count` requests, cancel them at the engine, and return them."""
        last = {number: self.open.pop(number) for number in sorted(self.open)[-count:]}
        for number in last:
            self._asks[number].cancel()
        self._num_initial -= len(last)
        self._note_change()
        return last

    def _progress(self) -> object:
        # An idle engine makes progress as long as its counts can be read.
        is_idle = self._is_working and not self._num_at_engine
        num_notes = self._num_notes if is_idle else 0
        return self._num_arrived, self._num_answered, num_notes

    def _note(self, counts: Counts) -> None:
        self._latest, self._noted_at = counts, time.monotonic()
        self._num_notes += 1

    def _note_change(self) -> None:
        self._change = self._num_notes, self._latest.generated

    @property
    def _is_recent(self) -> bool:
        return time.monotonic() - self._noted_at < RECENT_SECONDS

    @property
    def _is_known(self) -> bool:
        """Whether the latest counts are recent, and from after the queue last changed."""
        num_notes, generated = self._change
        # The first note may have been asked for before, and vLLM counts when a step is computed.
        is_later = self._num_notes - num_notes > 1 and self._latest.generated > generated
        return self._is_recent and is_later

    async def _start(self) -> None:
        """Make the engine hold requests back until all have arrived.

        If it started with whatever had arrived by then, batches would differ from run to run: sums
        would round differently, and now and then a different token would be sampled.
        """
        engine = self._engine
        try:
            await engine.pause()
            # Not 0 if an abandoned request is still counted.
            before = await engine.num_open_requests()
            self._is_sending = True
            self._send(self.open)
            while self._num_arrived < self._num_initial and not self._is_cut:
                await asyncio.sleep(POLL_INTERVAL)
                self._num_arrived = await engine.num_open_requests() - before
            # A counted request may not have reached vLLM's core yet: an engine's first requests ask
            # the core something before. It answers in order, so after this call they have gone on.
            await engine.held_push()
            await engine.post("/resume")
        except BaseException:
            # The requests are cancelled and the engine aborts them: it must not stay paused.
            with suppress(Exception):
                async with asyncio.timeout(RESUME_SECONDS):
                    await engine.post("/resume")
            raise

    async def _wait_for_cut(self) -> None:
        # Again for those that arrived after the last time.
        while self._is_cut and not all(ask.done() for ask in self._asks.values()):
            await self._engine.cut()
            await asyncio.sleep(POLL_INTERVAL)

    def _send(self, requests: Mapping[int, Json]) -> None:
        self.open |= requests
        for number in () if self._is_cut else requests:
            self._asks[number] = self._group.create_task(self._ask(number))

    async def _ask(self, number: int) -> None:
        try:
            while number in self.open:
                choice = await self._complete(self.open[number])
                self._num_answered += 1
                request = await self._take_answer(number, choice, self._engine.url)
                if choice.finish_reason == CUT:
                    return
                if request:
                    self.open[number] = request
                else:
                    del self.open[number]
        except asyncio.CancelledError:
            if number in self.open:  # it was not taken back
                raise
        except BaseException:
            self._is_working = self._is_sending = False  # the group takes no more tasks
            raise
        self._ended()

    async def _complete(self, request: Json) -> Choice:
        self._num_at_engine += 1
        try:
            return await self._engine.complete(request, self._policy_version, lambda: self._is_cut)
        finally:
            self._num_at_engine -= 1


BALANCE_INTERVAL = 1.0

T = TypeVar("T")


class RequestDispatcher:
    """Queues all open `requests` at the serving engines of the `pool`.

    If it `stays`, it goes on when they are answered, until it is `cut`, and more may be added.
    Raises NoServingEngine if none serves.
    """

    def __init__(
        self,
        pool: EnginePool,
        connect: Callable[[str], AbstractAsyncContextManager[Engine]],
        requests: Requests,
        stays: bool = False,
    ) -> None:
        if not (serving := pool.serving):
            raise NoServingEngine(f"no rollout engine serves:\n{pool.status_report()}")
        self._pool, self._connect, self._are_movable = pool, connect, requests.are_movable
        self._is_over = asyncio.Event()
        shares = level_shares([*requests.open.items()], [0] * len(serving))
        version, take = requests.policy_version, requests.take_answer
        self._stays = stays
        self._queues = {
            url: EngineQueue(dict(share), version, take, self._check_over)
            for url, share in zip(serving, shares, strict=True)
        }
        """Of each engine that is not lost, by address."""

    async def run(self) -> None:
        """Return when all requests are answered, except those of engines that were lost.

        If it stays: when it is cut, or no engine is left.
        """
        async with run_with(self._balance()):
            await gather_all(map(self._serve, [*self._queues]))

    def follow_up(self, number: int, request: Json, url: str) -> None:
        """Queue a request at the engine at `url`, or another one if that is lost."""
        if self._queues:
            least = min(self._queues.values(), key=lambda queue: len(queue.open))
            self._queues.get(url, least).enqueue({number: request})

    def add(self, requests: Mapping[int, Json], *, together: bool = False) -> None:
        """Queue more `requests`, with higher numbers; nothing happens if no engine is left.

        With `together`, all at the engine that has the fewest.
        """
        if together and self._queues:
            min(self._queues.values(), key=lambda queue: len(queue.open)).append(requests)
            return
        for queue, share in self._with_shares(requests):
            queue.append(share)

    def cut(self) -> None:
        """Have the engines give up their requests, and `run` return when they have."""
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

    async def _serve(self, url: str) -> None:
        """Have an engine answer its queue; mark it stale or dead if it cannot."""
        try:
            async with self._connect(url) as engine:
                await self._queues[url].answer(engine, self._is_over)
        except EngineStale as error:
            self._pool.mark_stale(url, str(error))
        except (EngineDown, TimeoutError) as error:  # late with an answer other than completions
            self._pool.mark_dead(url, str(error))
        left = self._queues.pop(url).open
        if self._stays and not self._is_over.is_set():
            for queue, share in self._with_shares(left):
                queue.enqueue(share)
        self._check_over()

    def _check_over(self) -> None:
        has_work = self._stays or any(queue.open for queue in self._queues.values())
        if not (self._queues and has_work):
            self._is_over.set()

    async def _balance(self) -> NoReturn:
        while True:
            await asyncio.sleep(BALANCE_INTERVAL)
            if self._are_movable and not self._is_over.is_set():
                self._move()

    def _move(self) -> None:
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
    """Split `items` into a contiguous part for each of the `loads`, the least one's the largest.

    With its part, each is as large as another, or has none: 5 items and loads of 3 and 0 yield
    parts of 1 and 4. So a slow engine, which has more left, gets less.
    """
    sizes, heap = [0] * len(loads), [(load, part) for part, load in enumerate(loads)]
    heapify(heap)
    for _ in items:
        load, part = heap[0]
        heapreplace(heap, (load + 1, part))
        sizes[part] += 1
    return [items[start:end] for start, end in pairwise([0, *accumulate(sizes)])]
