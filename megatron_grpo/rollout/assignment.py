"""Requests that one engine is to answer."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from megatron_grpo.rollout.choice import Choice
from megatron_grpo.rollout.engine import Engine, Json
from megatron_grpo.rollout.engine_error import EngineError
from megatron_grpo.rollout.tasks import beside, together

POLL_INTERVAL = 0.01
RESUME_SECONDS = 2.0

Take = Callable[[int, Choice, str], Awaitable[Json | None]]
"""Processes the answer to a request, by number, from the engine at an address; returns a follow-up
request, if there is one."""


class Assignment:
    """Requests that one engine is to answer, by number; the engine may have others.

    The engine must hold complete weights of `policy_version` at the start and those of the same
    push at the end, so that it held them throughout.
    """

    def __init__(
        self, engine: Engine, requests: Mapping[int, Json], policy_version: int, take: Take
    ) -> None:
        self.queue: int | None = None
        """Requests that the engine has not started yet, also of others, as last told. None if that
        was before those of this assignment had arrived."""
        self._engine, self._requests = engine, requests
        self._policy_version, self._take = policy_version, take
        self._calls: dict[int, asyncio.Task[Choice]] = {}
        """Those that the engine has not answered, by the number of the request."""
        self._num_answered = 0
        self._num_told: int | None = None
        """How often the engine has told its queue since the requests arrived; None before."""

    async def answer(self, *, is_idle: bool) -> None:
        """Return when all requests are answered or taken back.

        Each answer is passed to `take` as it arrives, and a follow-up request is sent next. While
        `take` is processing every answer, the engine has nothing to do and does not count as hung.
        An engine that `is_idle` starts with all requests together, in the order of priority.
        """
        asks = [partial(self._ask, *request) for request in self._requests.items()]
        async with beside(self._engine.watch(self._progress, self._note)):
            push = await self._engine.push_of(self._policy_version)
            if is_idle:
                await self._at_once(asks)
            else:
                self._num_told = 0
                await together(ask() for ask in asks)
            if await self._engine.held_push() != push:
                raise EngineError(
                    f"rollout engine {self._engine.url} was given new weights while it generated: "
                    "is another trainer using it?"
                )

    @property
    def numbers(self) -> list[int]:
        """Numbers of the requests that the engine has not answered."""
        return [number for number, call in self._calls.items() if not call.done()]

    def take_back(self, number: int) -> None:
        """Give up a request: the engine is not to answer it any more."""
        self._calls.pop(number).cancel()

    def forget_queue(self) -> None:
        """Wait for the engine to tell its queue anew, since requests have come or gone."""
        self.queue = None
        if self._num_told is not None:
            self._num_told = 0

    async def _ask(self, number: int, request: Json | None) -> None:
        while request is not None:
            call = asyncio.create_task(self._engine.complete(request, self._policy_version))
            self._calls[number] = call
            try:
                choice = await call
            except asyncio.CancelledError:
                if number in self._calls:
                    raise
                return  # it was taken back
            del self._calls[number]
            self._num_answered += 1
            request = await self._take(number, choice, self._engine.url)

    def _progress(self) -> float:
        return self._num_answered if self._calls else time.monotonic()

    def _note(self, queue: int) -> None:
        if self._num_told is not None:
            self._num_told += 1
            # What it tells first may be from before the requests arrived.
            self.queue = queue if self._num_told > 1 else None

    async def _at_once(self, asks: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        """Make the engine hold requests back until all of `asks` have arrived.

        If it started with whatever had arrived by then, batches would differ from run to run: sums
        would round differently, and now and then a different token would be sampled.
        """
        engine = self._engine

        async def release() -> None:
            while await engine.load() < before + len(asks):
                await asyncio.sleep(POLL_INTERVAL)
            # A counted request may not have reached vLLM's core yet: an engine's first requests ask
            # the core something before. It answers in order, so after this call they have gone on.
            await engine.held_push()
            await engine.post("/resume")
            self._num_told = 0

        try:
            await engine.pause()
            before = await engine.load()  # not 0 if an abandoned request is still counted
            await together([release(), *(ask() for ask in asks)])
        except BaseException:
            # The requests are cancelled and the engine aborts them: it must not stay paused.
            with suppress(Exception):
                async with asyncio.timeout(RESUME_SECONDS):
                    await engine.post("/resume")
            raise
