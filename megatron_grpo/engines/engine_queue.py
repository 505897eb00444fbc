"""The requests of a `RequestRouter` at one engine."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from megatron_grpo.engines.choice import CUT, Choice
from megatron_grpo.engines.engine import Counts, Engine
from megatron_grpo.engines.http import EngineError
from megatron_grpo.engines.request import Decode, Request
from megatron_grpo.workers.tasks import run_with, task_group
from parallel.clock import running_time

POLL_INTERVAL = 0.05
RESUME_SECONDS = 2.0
ABANDONED_SECONDS = 2.0
LEAST_ROOM = 64
"""First limit of an engine's requests; it doubles each second while no request waits."""


class EngineQueue:
    """The requests of one engine, until it is lost or `aborted`.

    `changed` is called when the engine may have room for more. With `streams`, answers arrive in
    parts, and another engine can continue those of a lost engine.
    """

    def __init__(
        self,
        policy_version: int,
        decode: Decode,
        changed: Callable[[], None],
        *,
        streams: bool,
        limit: float = LEAST_ROOM,
    ) -> None:
        self.open: dict[Request, None] = {}
        """Requests without an answer, in order of arrival."""
        self._policy_version = self._next_version = policy_version
        """Versions of the engine's weights: now, and after the next push."""
        self._decode, self._changed, self._streams = decode, changed, streams
        self._calls: dict[Request, asyncio.Task[None]] = {}
        self._push = ""
        """Id of the push that brought the weights."""
        self._turn = asyncio.Lock()
        """Held while the engine is asked for its push: checks keep the order of the pushes."""
        self.aborted = asyncio.Event()
        """Set to make the engine abort its requests, which stay `open`, and `serve` return."""
        self.has_started_or_failed = asyncio.Event()
        self._num_at_engine = self._num_arrived = self._num_answered = self._num_notes = 0
        self._is_sending = self._is_held = False
        self._is_working = False
        """Whether the engine has started and has not failed."""
        self.limit = limit
        """Maximum of requests while other engines have room, too."""
        self._last_note = 0.0, 0
        """Generated tokens and open requests at the last note."""

    @property
    def room(self) -> float:
        """Requests that the engine may get in addition while other engines have room, too."""
        return self.limit - len(self.open)

    async def serve(self, engine: Engine) -> None:
        """Have the engine answer its requests until `aborted`; raises the errors of `Engine`.

        The engine's push is checked at the start, before the next push, and at the end: if it is
        the same, the engine held these weights throughout.
        """
        self._engine = engine
        async with run_with(engine.watch(self._progress, self._note)):
            self._push = await engine.push_of(self._policy_version)
            async with task_group() as self._group:
                try:
                    if not self.open:  # it may have been aborted, and is paused since
                        await engine.post("/resume")
                    if self.open:
                        await self._start()
                    self._is_working = self._is_sending = True
                    self.has_started_or_failed.set()
                    await self.aborted.wait()
                    while self._calls:  # repeated: requests on their way miss a cut
                        await engine.cut()
                        await asyncio.sleep(POLL_INTERVAL)
                finally:
                    self._is_working = self._is_sending = False
            await self._check_push()

    def send(self, requests: Sequence[Request]) -> None:
        """Give the engine more requests, or queue them until it has started."""
        self.open |= dict.fromkeys(requests)
        if self._is_sending and not self.aborted.is_set():
            for request in requests:
                ask = self._calls[request] = self._group.create_task(self._ask(request))
                # The callback gets the task as well, which `pop` takes as its default.
                ask.add_done_callback(partial(self._calls.pop, request))

    def withdraw(self, request: Request) -> None:
        """Forget a request; the engine aborts it when its connection closes."""
        self.open.pop(request, None)
        if ask := self._calls.get(request):
            ask.cancel()

    async def hold(self, next_version: int) -> None:
        """Return when a push of `next_version` may begin, through which requests stay open."""
        await self.has_started_or_failed.wait()
        if self._is_working:
            # `wait` does not raise the error of a failed check: it ends `serve`, which raises it.
            await asyncio.wait([self._in_group(self._check_push)])
        self._next_version, self._is_held = next_version, True

    def resume(self) -> None:
        """Continue after that push; `serve` raises errors."""
        # In a task: the engine answers only when it has recomputed its requests.
        self._policy_version = self._next_version
        if self._is_working:
            self._in_group(self._note_push)
        else:
            self._is_held = False

    def _in_group(self, ask: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Run `ask` in the task group, after earlier ones; an error ends `serve`."""

        async def run() -> None:
            try:
                async with self._turn:
                    await ask()
            except BaseException:
                self._is_working = self._is_sending = False  # the group takes no more tasks
                raise

        return self._group.create_task(run())

    def _progress(self) -> object:
        if self._is_held:  # a push, and recomputing after it, have limits of their own
            return running_time()
        # An idle engine makes progress as long as its counts can be read.
        is_idle = self._is_working and not self._num_at_engine
        return self._num_arrived, self._num_answered, self._num_notes if is_idle else 0

    def _note(self, counts: Counts) -> None:
        """Adapt the limit: twice the open requests while none waits, less if a quarter waits."""
        self._num_notes += 1
        (generated, num_open), num_now = self._last_note, len(self.open)
        self._last_note = counts.generated, num_now
        # vLLM updates its metrics in each step: without new tokens, they are old.
        if not self._is_working or (self.open and counts.generated == generated):
            return
        if not counts.waiting:
            # The smaller number: the counts may not include requests since the last note.
            self.limit = max(self.limit, 2 * min(num_open, num_now))
        elif counts.waiting > self.limit // 4:
            self.limit = max(LEAST_ROOM // 8, num_now - counts.waiting // 2)
        self._changed()

    async def _note_push(self) -> None:
        self._push = await self._engine.push_of(self._policy_version)
        self._is_held = False

    async def _check_push(self) -> None:
        if await self._engine.held_push() != self._push:
            raise EngineError(
                f"rollout engine {self._engine.url} was given new weights while it generated: is "
                "another trainer using it?"
            )

    async def _start(self) -> None:
        """Hold all requests back until the last has arrived: otherwise batches, and with them the
        rounding of sums, would differ from run to run."""
        engine = self._engine
        try:
            await engine.pause()
            # Requests of an earlier client count until the engine has noticed that it is gone.
            deadline = running_time() + ABANDONED_SECONDS
            while (before := await engine.num_open_requests()) and running_time() < deadline:
                await asyncio.sleep(POLL_INTERVAL)
            self._is_sending = True
            self.send([*self.open])
            while self._num_arrived < len(self.open) and not self.aborted.is_set():
                await asyncio.sleep(POLL_INTERVAL)
                self._num_arrived = await engine.num_open_requests() - before
            # A counted request may not have reached vLLM's core: an engine's first requests query
            # the core before. It answers in order: after this call, these queries are answered.
            await engine.held_push()
            await engine.post("/resume")
        except BaseException:
            # The requests are cancelled, and the engine aborts them: it must not stay paused.
            with suppress(Exception):
                async with asyncio.timeout(RESUME_SECONDS):
                    await engine.post("/resume")
            raise

    async def _ask(self, request: Request) -> None:
        first, begun = self._policy_version, Choice.empty() if self._streams else None
        self._num_at_engine += 1
        try:
            choice = await self._engine.complete(
                request.rest,
                lambda: range(first, self._next_version + 1),  # pushes since then add versions
                self.aborted.is_set,
                begun,
            )
            self._num_answered += 1
            if request in self.open:
                request.take(choice, self._engine.url, self._decode)
        except BaseException as error:
            is_cancelled = isinstance(error, asyncio.CancelledError)
            if not is_cancelled:
                self._is_working = self._is_sending = False  # the group takes no more tasks
            if begun and begun.finish_reason == CUT and request in self.open:
                # The engine is lost: another engine continues these tokens.
                request.take(begun, self._engine.url, self._decode)
            if not is_cancelled or request in self.open:  # else it was withdrawn
                raise
        finally:
            self._num_at_engine -= 1
        if not request.is_open:
            self.open.pop(request, None)
        self._changed()
