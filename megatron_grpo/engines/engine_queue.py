"""The requests of a `RequestDispatcher` at one engine."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial

from megatron_grpo.engines.choice import CUT, Choice
from megatron_grpo.engines.engine import Counts, Engine, Json
from megatron_grpo.engines.http import EngineError
from megatron_grpo.workers.tasks import run_with, task_group
from parallel.clock import running_time

POLL_INTERVAL = 0.05
RESUME_SECONDS = 2.0
ABANDONED_SECONDS = 2.0
RECENT_SECONDS = 3.0
"""An engine that is well reports its counts at least this often."""

TakeAnswer = Callable[[int, Choice, str], Awaitable[Json | None]]
"""Processes the answer to a request, by number, from the engine at an address; returns a follow-up
request, if there is one. Of a request that was cut, the answer is what was sampled until then."""
KeepBegun = Callable[[int, Choice, str], Json | None]
"""Processes what an engine at an address had sampled for a request, by number, before it was lost;
returns the request for the rest, if there is one."""


class EngineQueue:
    """The requests of one engine, by number, which is also their priority.

    `ended` is called when a request is answered or was stolen. With `keep`, answers are streamed.
    """

    def __init__(
        self,
        requests: Mapping[int, Json],
        policy_version: int,
        take: TakeAnswer,
        ended: Callable[[], None],
        keep: KeepBegun | None = None,
    ) -> None:
        self.open = dict(requests)
        """Requests that are not answered, or their follow-ups."""
        self._policy_version = self._next_version = policy_version
        """Versions of the weights that the engine has, and that it has after the next push."""
        self._take_answer, self._ended, self._keep = take, ended, keep
        self._asks: dict[int, asyncio.Task[None]] = {}
        self._push = ""
        """The push that the weights came with."""
        self._turn = asyncio.Lock()
        """Held while the engine is asked which push it holds."""
        self.has_started_or_failed = asyncio.Event()
        self._num_at_engine = self._num_arrived = self._num_answered = 0
        self._is_sending = self._is_cut = self._is_held = False
        self._is_working = False
        """Whether the engine has started and has not failed."""
        self._num_initial = len(requests)
        """Requests received since `_first`, without those stolen or forgotten."""
        self._has_taken_over = False
        self._first = self._latest = Counts()
        """The engine's counts when it last had no unstarted requests, and the latest."""
        self._noted_at = -math.inf
        self._num_notes = 0
        self._change = 0, 0.0
        """`_num_notes` and `_latest.generated` when the queue last changed."""

    async def answer(self, engine: Engine, is_over: asyncio.Event) -> None:
        """Have the engine answer all requests, with those enqueued before `is_over`.

        Each answer is passed to `take` as it arrives, and a follow-up request is sent next. While
        `take` is processing every answer, the engine has nothing to do and does not count as hung.
        It must hold complete weights of the version at the start, and those of the same push at the
        end and before the next push, so that it held them throughout.
        """
        self._engine = engine
        async with run_with(engine.watch(self._progress, self._note)):
            await self._note_push()
            self._first = self._latest = await engine.counts()
            async with task_group() as self._group:
                try:
                    if self.open:
                        await self._start()
                    self._is_working = self._is_sending = True
                    self._note_change()
                    self.has_started_or_failed.set()
                    await is_over.wait()
                    while self._is_cut and self._asks:  # again for those that arrived since
                        await engine.cut()
                        await asyncio.sleep(POLL_INTERVAL)
                finally:
                    self._is_working = self._is_sending = False
            await self._check_push()

    async def hold(self, next_version: int) -> None:
        """Return when a push of that version may begin, through which the engine keeps its
        requests. Errors are raised by `answer`."""
        await self.has_started_or_failed.wait()
        if self._is_working:
            await asyncio.wait([self._in_group(self._check_push)])
        self._next_version, self._is_held = next_version, True

    def resume(self) -> None:
        """Continue after that push. Errors are raised by `answer`.

        Nobody waits: the engine answers when it has recomputed what it continues with.
        """
        self._policy_version = self._next_version
        self._note_change()
        if self._is_working:
            self._in_group(self._note_next_push)
        else:
            self._is_held = False

    def _in_group(self, ask: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Run `ask` in the task group, after earlier ones; an error ends `answer`."""

        async def asked() -> None:
            try:
                async with self._turn:
                    await ask()
            except BaseException:
                self._is_working = self._is_sending = False  # the group takes no more tasks
                raise

        return self._group.create_task(asked())

    @property
    def has_room(self) -> bool:
        """Whether the engine has started, and no request waits."""
        is_known = self._is_known if self.open else self._is_recent
        return self._is_working and is_known and self._latest.waiting == 0

    @property
    def num_unstarted(self) -> int:
        """Number of requests that the engine has not started: those with the highest numbers.

        0 if that is not known, or if requests came that may have lower numbers than started ones:
        from other engines, or next turns of dialogues. `waiting` alone would include requests that
        vLLM has preempted, which have tokens to lose.
        """
        if not self._is_working or not self._is_known or self._has_taken_over:
            return 0
        unstarted = self._num_initial - (self._latest.started - self._first.started)
        return max(0, int(min(unstarted, self._latest.waiting, len(self.open))))

    def enqueue(self, requests: Mapping[int, Json]) -> None:
        """Queue requests from another engine's queue, or next turns of dialogues."""
        self._has_taken_over = True
        self.append(requests)

    def append(self, requests: Mapping[int, Json]) -> None:
        """Queue requests whose numbers are higher than those of all others here.

        An engine that has not started gets them when it does; one that has failed leaves them
        `open`.
        """
        self._num_initial += len(requests)
        if self._is_sending:
            self._send(requests)
            self._note_change()
        else:
            self.open |= requests

    def forget(self, numbers: range) -> None:
        """Remove requests, and cancel them at the engine."""
        for number in [each for each in self.open if each in numbers]:
            del self.open[number]
            self._num_initial -= 1
            if ask := self._asks.get(number):
                ask.cancel()
        self._note_change()

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
        if self._is_held:  # a push, and recomputing after it, have limits of their own
            return running_time()
        # An idle engine makes progress as long as its counts can be read.
        is_idle = self._is_working and not self._num_at_engine
        num_notes = self._num_notes if is_idle else 0
        return self._num_arrived, self._num_answered, num_notes

    def _note(self, counts: Counts) -> None:
        self._latest, self._noted_at = counts, running_time()
        self._num_notes += 1
        if self._is_working and self._is_known and not counts.waiting:  # all requests have started
            self._first, self._num_initial, self._has_taken_over = counts, 0, False

    def _note_change(self) -> None:
        self._change = self._num_notes, self._latest.generated

    @property
    def _is_recent(self) -> bool:
        return running_time() - self._noted_at < RECENT_SECONDS

    @property
    def _is_known(self) -> bool:
        """Whether the latest counts are recent, and from after the queue last changed."""
        num_notes, generated = self._change
        # The first note may have been asked for before, and vLLM counts when a step is computed.
        is_later = self._num_notes - num_notes > 1 and self._latest.generated > generated
        return self._is_recent and is_later

    async def _note_push(self) -> None:
        self._push = await self._engine.push_of(self._policy_version)

    async def _note_next_push(self) -> None:
        await self._note_push()
        self._is_held = False

    async def _check_push(self) -> None:
        if await self._engine.held_push() != self._push:
            raise EngineError(
                f"rollout engine {self._engine.url} was given new weights while it generated: is "
                "another trainer using it?"
            )

    async def _start(self) -> None:
        """Make the engine hold requests back until all have arrived.

        If it started with whatever had arrived by then, batches would differ from run to run: sums
        would round differently, and now and then a different token would be sampled.
        """
        engine = self._engine
        try:
            await engine.pause()
            # Not 0 while abandoned requests are still counted.
            deadline = running_time() + ABANDONED_SECONDS
            while (before := await engine.num_open_requests()) and running_time() < deadline:
                await asyncio.sleep(POLL_INTERVAL)
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

    def _send(self, requests: Mapping[int, Json]) -> None:
        self.open |= requests
        for number in () if self._is_cut else requests:
            ask = self._group.create_task(self._ask(number))
            self._asks[number] = ask
            ask.add_done_callback(partial(self._forget_ask, number))

    def _forget_ask(self, number: int, ask: asyncio.Task[None]) -> None:
        if self._asks[number] is ask:  # else the request was stolen, came back and is asked again
            del self._asks[number]

    async def _ask(self, number: int) -> None:
        try:
            while number in self.open:
                choice = await self._complete(number)
                self._num_answered += 1
                request = await self._take_answer(number, choice, self._engine.url)
                if choice.finish_reason == CUT:
                    return
                if request:
                    self.open[number] = request
                else:
                    del self.open[number]
        except asyncio.CancelledError:
            if number in self.open:  # else it was stolen or forgotten
                raise
        except BaseException:
            self._is_working = self._is_sending = False  # the group takes no more tasks
            raise
        self._ended()

    async def _complete(self, number: int) -> Choice:
        first, begun = self._policy_version, Choice.empty() if self._keep else None
        self._num_at_engine += 1
        try:
            return await self._engine.complete(
                self.open[number],
                lambda: range(first, self._next_version + 1),
                lambda: self._is_cut,
                begun,
            )
        except BaseException:  # also if it is cancelled because the engine is lost
            # A request that was stolen may have come back, and be asked by another task.
            is_own = number in self.open and self._asks.get(number) is asyncio.current_task()
            if is_own and begun and begun.token_ids and begun.finish_reason == CUT:
                assert self._keep is not None
                # Another engine continues what this one has sampled.
                if rest := self._keep(number, begun, self._engine.url):
                    self.open[number] = rest
                else:
                    del self.open[number]
            raise
        finally:
            self._num_at_engine -= 1
