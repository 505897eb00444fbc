"""Requests at the engines, through pushes of weights and losses of engines.

Requests wait in one queue, ordered by priority, and every engine takes as many as it has room for:
a slow engine gets fewer, and nothing must be taken back from it. A single engine gets all at once,
before it starts, so that its batches are the same in every run.

Engines keep their requests through a push. They pause, drop all keys and values, and recompute
them with the new weights before they continue: the probability of every token is then that of its
own version's weights given all tokens before it, as in a training forward.

For a checkpoint or an evaluation, requests are aborted: the tokens so far are kept, and the rest of
each completion is requested later, with these tokens as its prompt. The loss of an engine aborts
its requests, too: answers are streamed, and the tokens that arrived are kept.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from heapq import heappop, heappush
from itertools import count, groupby
from operator import attrgetter
from typing import Any

from megatron_grpo.engines.client import POLL_SECONDS, RolloutClient
from megatron_grpo.engines.engine_queue import LEAST_ROOM, EngineQueue
from megatron_grpo.engines.http import EngineDown, EngineStale, NoServingEngine
from megatron_grpo.engines.request import Decode, Request
from megatron_grpo.launch.process import Preempted
from megatron_grpo.workers.event_loop import Notice

BATCH = attrgetter("batch")
ABORT_SECONDS = 5.0
"""Time for engines to return the tokens so far when the run is to stop."""


class RequestRouter:
    """Distributes requests over the engines of a client; idle until the first `resume`.

    All methods belong to the event loop. Without `streams`, a completion whose engine is lost
    starts anew.

    It stops, with the reason in `failure`, when no engine serves (NoServingEngine: abort, push, and
    resume), an engine answers nonsense (EngineError), or the client is cancelled (Preempted, for
    good). Requests stay open, and `until` raises the failure.
    """

    def __init__(self, client: RolloutClient, decode: Decode, *, streams: bool = True) -> None:
        self.failure: Exception | None = None
        self.changed = Notice()
        """Wakes every `until`: given at a failure, or by callers when a condition may hold."""
        self.policy_version = 0
        """Version of the weights that the engines hold."""
        self.loop = client.loop
        self._client, self._decode, self._streams = client, decode, streams
        self._batches = count(1)
        self._waiting: list[tuple[int, int, list[Request]]] = []
        """A heap of batches, by priority and number."""
        self._queues: dict[str, EngineQueue] = {}
        self._lives: dict[str, int] = {}
        """Losses of each engine before its queue was made, which identify its life."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Calls of `_serve` by address, one for each engine that is not lost."""
        self._limits: dict[str, float] = {}
        """Last limit of each engine, with which its next queue begins."""
        self._losing = asyncio.Lock()
        """Held for `EnginePool.mark_dead`, which one thread at a time may call."""
        self._is_held = self._is_feeding = False
        self._guard: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return bool(self._tasks)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests that share their prompt, or a turn of a session, which goes to the engine
        with the last turn in its cache, if that serves."""
        batch = next(self._batches)
        for request in requests:
            request.batch = batch
            request.answer.add_done_callback(partial(self._withdraw, request))
        url = requests[0].url if requests else ""
        if url in self._queues:
            self._queues[url].send(requests)
        else:
            self._enqueue(requests)

    async def until(self, is_reached: Callable[[], object]) -> None:
        """Return when `is_reached()`, checked after each notice of `changed`; raises `failure` if
        that comes first."""
        await self.changed.until(lambda: self.failure or is_reached())
        if self.failure and not is_reached():
            raise self.failure

    async def resume(self, policy_version: int) -> None:
        """Have all engines that serve now continue, with weights of `policy_version`."""
        self.policy_version = policy_version
        if self._guard is None:
            self._guard = asyncio.create_task(self._stop_when_cancelled())
        if isinstance(self.failure, NoServingEngine):
            self.failure = None
        if self.failure:  # the end of the run
            return
        pool = self._client.pool
        serving = pool.serving
        # Lost in a push, which marks its engines itself, or restarted since its queue was made.
        if lost := [url for url, life in self._lives.items() if serving.get(url) != life]:
            await self._end(lost)
        self._is_held = False
        for queue in self._queues.values():
            queue.resume()
        if serving.keys() - self._queues.keys():
            # A new engine gets its share only if all requests are dealt anew; tokens are kept.
            await self.abort()
            serving = pool.serving  # an engine may have been lost meanwhile
        for url in serving.keys() - self._queues.keys():
            queue = EngineQueue(
                policy_version,
                self._decode,
                self._feed,
                streams=self._streams,
                limit=self._limits.get(url, LEAST_ROOM),
            )
            self._queues[url], self._lives[url] = queue, serving[url]
            self._tasks[url] = asyncio.create_task(self._serve(url, queue))
        self._feed()
        self._fail_if_alone()

    async def pause(self, next_version: int) -> None:
        """Return when a push of `next_version` may begin, through which the engines keep their
        requests."""
        if self._client.pool.has_leavers:  # other engines must continue its completions
            await self.abort()
            return
        self._is_held = True
        await asyncio.gather(*(queue.hold(next_version) for queue in self._queues.values()))

    async def abort(self) -> None:
        """Return when no engine has a request; tokens so far are kept until `resume`."""
        while self._tasks:  # a round of dynamic sampling may resume meanwhile
            for queue in self._queues.values():
                queue.aborted.set()
            await asyncio.wait([*self._tasks.values()])
        self._is_held = False

    async def run_alone(self, policy_version: int, is_reached: Callable[[], object]) -> None:
        """Resume until `is_reached()`, with one version of the weights, and abort. After a failure,
        push the same weights and call this again."""
        try:
            await self.resume(policy_version)
            await self.until(is_reached)
        finally:
            await self.abort()
        if self.failure:  # an engine held other weights at the end
            raise self.failure

    async def close(self) -> None:
        """Stop for good; open requests are never answered."""
        if self._guard:
            self._guard.cancel()
        await self._end([*self._tasks])

    def _enqueue(self, requests: Sequence[Request]) -> None:
        """Queue requests of one batch."""
        # The batch number breaks ties: lists of requests cannot be compared.
        heappush(self._waiting, (requests[0].priority, requests[0].batch, [*requests]))
        if not self._is_feeding:
            self._is_feeding = True
            # Not at once: batches of one turn of the loop are dealt in order of priority.
            asyncio.get_running_loop().call_soon(self._feed)

    def _feed(self) -> None:
        self._is_feeding = False
        while self._waiting and (queue := self._next_queue()):
            _, _, requests = heappop(self._waiting)
            queue.send([request for request in requests if request.is_open])

    def _next_queue(self) -> EngineQueue | None:
        """The engine with the most room, if any has some and no push is under way."""
        queues = [*self._queues.values()]
        if self._is_held or not queues:
            return None
        if len(queues) == 1:
            return queues[0]  # whatever its room, which depends on timing: batches must not
        best = max(queues, key=lambda queue: queue.room)
        return best if best.room > 0 else None

    def _withdraw(self, request: Request, answer: "asyncio.Future[Any]") -> None:
        if answer.cancelled():
            for queue in self._queues.values():
                queue.withdraw(request)

    async def _serve(self, url: str, queue: EngineQueue) -> None:
        """Have an engine answer its queue; mark it stale or dead if it cannot."""
        failure: Exception | None = None
        pool = self._client.pool
        try:
            await queue.serve(self._client.engine(url))
        except EngineStale as error:
            if not self._is_held:  # a push marks its engines itself
                pool.mark_stale(url, str(error))
        except (EngineDown, TimeoutError) as error:  # completions have no time limit, others do
            if not self._is_held:
                async with self._losing:  # to kill it takes seconds
                    await asyncio.to_thread(pool.mark_dead, url, str(error))
        except Exception as error:  # of any kind: `until` must raise it, or it waits forever
            failure = error
        finally:
            queue.has_started_or_failed.set()  # or a push would wait for this engine forever
            self._limits[url] = queue.limit
            del self._queues[url], self._lives[url], self._tasks[url]
            # One entry for each batch: its requests share a prompt, which one engine caches.
            left = sorted([each for each in queue.open if each.is_open], key=BATCH)
            for _, requests in groupby(left, key=BATCH):
                self._enqueue([*requests])
        if failure:
            self._fail(failure)
        elif not queue.aborted.is_set():  # after `abort`, having no engine is no failure
            self._fail_if_alone()

    def _fail_if_alone(self) -> None:
        if not (self._queues or self._is_held):
            report = self._client.pool.status_report()
            self._fail(NoServingEngine(f"no rollout engine serves:\n{report}"))

    def _fail(self, failure: Exception) -> None:
        # The first failure is the cause of later ones; Preempted is for good, so it replaces any.
        if self.failure is None or isinstance(failure, Preempted):
            self.failure = failure
        for queue in self._queues.values():
            queue.aborted.set()
        self.changed.give()

    async def _end(self, urls: Sequence[str]) -> None:
        """Cancel the requests at these engines, and queue them again."""
        tasks = [self._tasks[url] for url in urls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _stop_when_cancelled(self) -> None:
        while not self._client.is_cancelled:
            await asyncio.sleep(POLL_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(ABORT_SECONDS):
                await self.abort()
        self._fail(Preempted("the generation was given up"))
        await self._end([*self._tasks])  # an engine that hangs
