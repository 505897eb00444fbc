"""Requests that one engine is to answer."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from megatron_grpo.rollout.choice import Choice
from megatron_grpo.rollout.engine import Counts, Engine, Json
from megatron_grpo.rollout.engine_error import EngineError
from megatron_grpo.rollout.tasks import beside, task_group

POLL_INTERVAL = 0.01
RESUME_SECONDS = 2.0

Take = Callable[[int, Choice, str], Awaitable[Json | None]]
"""Processes the answer to a request, by number, from the engine at an address; returns a follow-up
request, if there is one."""


class Assignment:
    """Requests that one engine is to answer, by number, which is also their priority.

    `ended` is called whenever nothing is left to do for a number.
    """

    def __init__(
        self,
        requests: Mapping[int, Json],
        policy_version: int,
        take: Take,
        ended: Callable[[], None],
    ) -> None:
        self.open = dict(requests)
        """Requests that are not answered, or their follow-ups."""
        self._policy_version, self._take, self._ended = policy_version, take, ended
        self._asks: dict[int, asyncio.Task[None]] = {}
        self._num_sent = len(requests)
        self._num_at_engine = self._num_answered = 0
        self._has_been_given = False
        self._is_working = False
        """Whether the engine has started, and has not failed."""
        self._first = self._latest = Counts()
        """The engine's counts before it started, and now."""
        self._changed_at = 0.0
        """How many tokens the engine had generated when requests last came or went."""

    async def answer(self, engine: Engine, is_over: asyncio.Event) -> None:
        """Have the engine answer all requests, and those that it is given before `is_over`.

        Each answer is passed to `take` as it arrives, and a follow-up request is sent next. While
        `take` is processing every answer, the engine has nothing to do and does not count as hung.
        It must hold complete weights of the version at the start and those of the same push at the
        end, so that it held them throughout.
        """
        async with beside(engine.watch(self._progress, self._note)):
            push = await engine.push_of(self._policy_version)
            async with task_group() as self._group:
                try:
                    await self._start(engine)
                    await is_over.wait()
                finally:
                    self._is_working = False
            if await engine.held_push() != push:
                raise EngineError(
                    f"rollout engine {engine.url} was given new weights while it generated: is "
                    "another trainer using it?"
                )

    @property
    def has_room(self) -> bool:
        """Whether the engine has started, and no request waits."""
        is_free = not self.open or (self._is_known and self._latest.waiting == 0)
        return self._is_working and is_free

    @property
    def num_unstarted(self) -> int:
        """How many of the last requests the engine has not started; 0 if that is not known.

        vLLM also counts those as waiting that it has preempted: they have tokens, and would lose
        them. What an engine was given may come before what it has started.
        """
        if not self._is_working or not self._is_known or self._has_been_given:
            return 0
        started = self._latest.started - self._first.started
        return max(0, int(min(self._num_sent - started, self._latest.waiting)))

    def give(self, requests: Mapping[int, Json]) -> None:
        """Have the engine answer these, too."""
        self._has_been_given = True
        self._send(requests)
        self._changed_at = self._latest.generated

    def take_back(self, count: int) -> dict[int, Json]:
        """The last `count` requests, which the engine is not to answer any more."""
        last = {number: self.open.pop(number) for number in sorted(self.open)[-count:]}
        for number in last:
            self._asks[number].cancel()
        self._num_sent -= count
        self._changed_at = self._latest.generated
        return last

    @property
    def _is_known(self) -> bool:
        # vLLM counts when it has computed a step.
        return self._latest.generated > self._changed_at

    def _note(self, counts: Counts) -> None:
        self._latest = counts

    def _progress(self) -> float:
        return self._num_answered if self._num_at_engine else time.monotonic()

    async def _start(self, engine: Engine) -> None:
        """Make the engine hold requests back until all have arrived.

        If it started with whatever had arrived by then, batches would differ from run to run: sums
        would round differently, and now and then a different token would be sampled.
        """
        self._engine = engine
        try:
            await engine.pause()
            before = await engine.load()  # not 0 if an abandoned request is still counted
            self._first = self._latest = await engine.counts()
            self._send(self.open)
            while await engine.load() < before + self._num_sent:
                await asyncio.sleep(POLL_INTERVAL)
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
        self._changed_at, self._is_working = self._first.generated, True

    def _send(self, requests: Mapping[int, Json]) -> None:
        self.open |= requests
        for number in requests:
            self._asks[number] = self._group.create_task(self._ask(number))

    async def _ask(self, number: int) -> None:
        try:
            while number in self.open:
                choice = await self._complete(self.open[number])
                self._num_answered += 1
                if request := await self._take(number, choice, self._engine.url):
                    self.open[number] = request
                else:
                    del self.open[number]
        except asyncio.CancelledError:
            if number in self.open:
                raise
        except BaseException:
            self._is_working = False
            raise
        self._ended()

    async def _complete(self, request: Json) -> Choice:
        self._num_at_engine += 1
        try:
            return await self._engine.complete(request, self._policy_version)
        finally:
            self._num_at_engine -= 1
