"""Several generations at the engines at once, through pushes of weights.

Engines keep their requests through a push. They pause for it, drop all keys and values, and
recompute what they have sampled with the new weights before they continue: so every token has the
probability that the weights of its own version give it after all tokens before it, as in a training
forward.

For a checkpoint or an evaluation, requests are cut: the engines give them up, the tokens sampled so
far stay, and the rest of each completion is requested later, with these tokens as its prompt. The
loss of an engine cuts its requests, too: answers are streamed, and what has arrived stays.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NoReturn

from megatron_grpo.data.samples import Sample
from megatron_grpo.engines.choice import CUT, Choice
from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.engines.cuts import Decode, joined, rest_of
from megatron_grpo.engines.dispatch import RequestDispatcher
from megatron_grpo.engines.engine import Json
from megatron_grpo.engines.generation import SampleRequests
from megatron_grpo.launch.process import Preempted
from megatron_grpo.workers.tasks import run_with
from parallel.clock import RunningLoop

ALONE = -1
"""The number of the generation in a run that makes one at a time."""
MOST_REQUESTS = 1 << 32
"""More requests than a generation has. Request n of generation g has number g * MOST_REQUESTS + n
here."""
CUT_SECONDS = 5.0
"""How long a run that is to stop waits for the tokens that engines have sampled."""


@dataclass
class OpenGeneration:
    """The requests of a generation, and the future that is done when all are answered."""

    requests: SampleRequests
    answered: asyncio.Future[None]
    waits: set[asyncio.Task[None]] = field(default_factory=set)
    """Tasks that wait for environments."""

    def fail(self, error: Exception) -> None:
        """Let `answered` raise `error`."""
        if not self.answered.done():
            self.answered.set_exception(error)

    def end_if_complete(self) -> None:
        """Complete `answered` if no request is left."""
        if self.requests.is_complete and not self.answered.done():
            self.answered.set_result(None)


class OpenGenerations:
    """The open requests of several generations, as those of one; earlier generations go first.

    The environment of a dialogue may answer at any time, also during a push: then `ask` is called
    with the number of the next request, the request, and the address of the engine that had the one
    before, if any.
    """

    are_movable = True

    def __init__(self, decode: Decode, ask: Callable[[int, Json, str], None]) -> None:
        self.policy_version = 0
        """Version of the weights that the engines hold."""
        self._decode, self._ask = decode, ask
        self._generations: dict[int, OpenGeneration] = {}

    @property
    def open(self) -> dict[int, Json]:
        """Unanswered requests for completions, or for the rest of those that were cut."""
        return {
            number: request
            for generation in sorted(self._generations)
            for number, request in self.open_of(generation).items()
        }

    def open_of(self, generation: int) -> dict[int, Json]:
        """The unanswered requests of one generation."""
        requests = self._generations[generation].requests
        first, found = generation * MOST_REQUESTS, {}
        for own_number, request in requests.open.items():
            begun = requests.begun.get(own_number)
            found[first + own_number] = _rest(request, begun, first + own_number)
        return found

    def end_complete(self) -> None:
        """Complete the futures of those generations that have no request left. The session of an
        agent may end while its requests were cut: then no answer to them comes any more."""
        for opened in self._generations.values():
            opened.end_if_complete()

    @contextmanager
    def opened(self, generation: int, requests: SampleRequests) -> Iterator[asyncio.Future[None]]:
        """Add the `requests` of a generation within the block; yields the future that is done when
        all are answered."""
        answered = asyncio.get_running_loop().create_future()
        self._generations[generation] = opened = OpenGeneration(requests, answered)
        for own_number in requests.waiting:
            self._wait(generation, own_number, "")
        opened.end_if_complete()  # a checkpoint may have had all answers
        try:
            yield answered
        finally:
            for wait in opened.waits:
                wait.cancel()  # if the requests are opened again, they start anew
            del self._generations[generation]

    async def give_up(self, generations: Iterable[int]) -> None:
        """Cancel the futures of those generations that are not answered; returns when they are
        removed."""
        waiting = {number for number in generations if number in self._generations}
        for number in waiting:
            self._generations[number].answered.cancel()
        while waiting & self._generations.keys():
            await asyncio.sleep(0)

    def fail(self, error: Exception) -> None:
        """Let all futures raise `error`; the requests may be opened again."""
        for opened in self._generations.values():
            opened.fail(error)

    async def take_answer(self, number: int, choice: Choice, url: str) -> Json | None:
        """Pass a complete answer to its generation; of one that was cut, keep what was sampled."""
        self._take(number, choice, url)
        return None

    def keep(self, number: int, begun: Choice, url: str) -> Json | None:
        """Keep what was sampled of a completion before its engine was lost; returns the request for
        the rest, None if a stop string ends it or the generation is no longer open."""
        generation, own_number = divmod(number, MOST_REQUESTS)
        if (opened := self._generations.get(generation)) is None:
            return None
        if (request := opened.requests.open_request(own_number)) is None:
            opened.end_if_complete()
            return None
        self._take(number, begun, url)
        kept = opened.requests.begun.get(own_number)
        return _rest(request, kept, number) if kept else None

    def _take(self, number: int, choice: Choice, url: str) -> None:
        if choice.finish_reason == CUT and not choice.token_ids:
            return
        generation, own_number = divmod(number, MOST_REQUESTS)
        if (opened := self._generations.get(generation)) is None:  # its environments are lost
            return
        requests = opened.requests
        if begun := requests.begun.get(own_number):
            choice = joined(begun, choice, self._decode, requests.stop)
        if choice.finish_reason == CUT:
            requests.begun[own_number] = choice
            return
        requests.add_answer(own_number, choice, url)
        if requests.is_waiting(own_number):
            self._wait(generation, own_number, url)
        opened.end_if_complete()

    def _wait(self, generation: int, own_number: int, url: str) -> None:
        opened = self._generations[generation]
        wait = asyncio.ensure_future(self._follow_up(opened, generation, own_number, url))
        opened.waits.add(wait)
        wait.add_done_callback(opened.waits.discard)

    async def _follow_up(
        self, opened: OpenGeneration, generation: int, own_number: int, url: str
    ) -> None:
        """Queue the next request of a dialogue when its environment has answered."""
        try:
            request = await opened.requests.next_request(own_number)
        except Exception as error:  # of any kind: `answered` must raise it
            opened.fail(error)
            return
        number = generation * MOST_REQUESTS + own_number
        if request:
            self._ask(number, {**request, "priority": number}, url)
        opened.end_if_complete()


class InFlight:
    """Has the engines answer several generations at once, also through pushes.

    It begins suspended. A thread of its own talks to the engines until `close`. Unless it
    `streams`, a completion whose engine is lost starts anew.
    """

    def __init__(self, client: RolloutClient, decode: Decode, *, streams: bool = True) -> None:
        self._client, self._streams = client, streams
        self._generations = OpenGenerations(decode, self._ask)
        self._dispatcher: RequestDispatcher | None = None
        self._ended: Exception | None = None
        self._lost: Exception | None = None
        """Why dispatching ended; raised for new requests until the next push."""
        self._loop = RunningLoop()
        self._may_dispatch, self._is_idle = asyncio.Event(), asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="in_flight")
        self._thread.submit(self._loop.run_forever)
        self._running = asyncio.run_coroutine_threadsafe(self._run(), self._loop)

    def generate(self, generation: int, requests: SampleRequests) -> list[Sample]:
        """All samples of `requests`, once they are answered; called by one thread of each
        generation.

        Raises NoServingEngine when no engine is left: `hold`, push, `resume`, and call again.
        Raises Preempted once the client was cancelled.
        """
        self.submit(generation, requests).result()
        return requests.samples()

    def generate_alone(self, requests: SampleRequests) -> list[Sample]:
        """As `generate`, in a run that makes one generation at a time and pushes between them."""
        self.resume(requests.policy_version)
        try:
            return self.generate(ALONE, requests)
        finally:
            self.suspend()

    def submit(
        self, generation: int, requests: SampleRequests, *, together: bool = False
    ) -> Future[None]:
        """As `generate`, without waiting: the future is done when all `requests` are answered.

        With `together`, one engine gets all of them, as they share their prompt.
        """
        asked = self._generate(generation, requests, together)
        return asyncio.run_coroutine_threadsafe(asked, self._loop)

    def give_up(self, generations: Iterable[int]) -> None:
        """Cancel those of these generations that are not answered; to be called before `resume`."""
        given_up = self._generations.give_up(generations)
        asyncio.run_coroutine_threadsafe(given_up, self._loop).result()

    def hold(self, next_version: int) -> None:
        """Return when a push of that version may begin, through which the engines keep their
        requests. If an engine leaves, they are cut, so that others continue with its tokens."""
        asyncio.run_coroutine_threadsafe(self._hold(next_version), self._loop).result()

    def suspend(self) -> None:
        """Cut all requests before a push: returns when no engine has any. New ones wait for
        `resume`."""
        asyncio.run_coroutine_threadsafe(self._suspend(), self._loop).result()

    def resume(self, policy_version: int) -> None:
        """Continue with weights of that version."""
        asyncio.run_coroutine_threadsafe(self._resume(policy_version), self._loop).result()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Cut all requests for the time of the block."""
        may_dispatch = self._may_dispatch.is_set()
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result()
        yield
        if may_dispatch:
            self.resume(self._generations.policy_version)

    def end(self) -> None:
        """Cancel the client, and stop dispatching."""
        self._client.cancel()
        self._running.result()

    def close(self) -> None:
        """End the thread, after `end` and after the engines that it started."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.shutdown()
        self._loop.close()

    async def _generate(self, generation: int, requests: SampleRequests, together: bool) -> None:
        if failure := self._ended or self._lost:
            raise failure
        with self._generations.opened(generation, requests) as answered:
            if self._dispatcher:
                self._dispatcher.add(self._generations.open_of(generation), together=together)
            self._generations.end_complete()
            try:
                await answered
            except BaseException:
                if self._dispatcher:
                    first = generation * MOST_REQUESTS
                    self._dispatcher.forget(range(first, first + MOST_REQUESTS))
                raise

    def _ask(self, number: int, request: Json, url: str) -> None:
        if self._dispatcher:  # else the next one begins with it
            self._dispatcher.follow_up(number, request, url)

    async def _hold(self, next_version: int) -> None:
        if self._client.pool.has_leavers:
            await self._suspend()
            return
        self._may_dispatch.clear()
        self._end_of_version()
        if self._dispatcher:
            await self._dispatcher.hold(next_version)

    async def _resume(self, policy_version: int) -> None:
        self._generations.policy_version = policy_version
        if self._dispatcher:
            await self._dispatcher.resume()
        self._may_dispatch.set()

    async def _suspend(self) -> None:
        await self._cut()
        self._end_of_version()

    def _end_of_version(self) -> None:
        self._lost = None
        self._client.pool.finish_generation()  # engines that served from push to push

    async def _cut(self) -> None:
        self._may_dispatch.clear()
        if self._dispatcher:
            self._dispatcher.cut()
        await self._is_idle.wait()

    async def _cut_when_cancelled(self) -> NoReturn:
        try:
            await self._client.raise_when_cancelled()
        except Preempted:
            with suppress(TimeoutError):
                async with asyncio.timeout(CUT_SECONDS):
                    await self._cut()
            raise

    async def _run(self) -> None:
        try:
            async with run_with(self._cut_when_cancelled()):
                while True:
                    self._is_idle.set()
                    await self._may_dispatch.wait()
                    self._is_idle.clear()
                    await self._dispatch()
        except Exception as error:  # Preempted
            self._ended = error
            self._generations.fail(error)
        self._is_idle.set()

    async def _dispatch(self) -> None:
        """Keep the engines busy until they are cut, or none is left."""
        generations = self._generations
        try:
            self._dispatcher = RequestDispatcher(
                self._client.pool,
                self._client.connect,
                generations,
                stays=True,
                keep=generations.keep if self._streams else None,
            )
            generations.end_complete()
            await self._dispatcher.run()
        except Exception as error:  # of any kind: the futures must raise it
            self._may_dispatch.clear()
            self._lost = error
            generations.fail(error)
        finally:
            self._dispatcher = None


def _rest(request: Json, begun: Choice | None, number: int) -> Json:
    """What is left of an open request, with its number as priority."""
    return {**(rest_of(request, begun) if begun else request), "priority": number}
