"""Several generations at the engines at once, through pushes of weights.

Before a push the engines give up what they work on. The tokens sampled so far stay, and the rest of
each completion is asked for after the push, with these tokens as its prompt: the new weights
compute them anew, so that every token has the probability that the weights of its own version give
it after all tokens before it, as in a training forward. At a push nothing runs in an engine.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from megatron_grpo.data.samples import Sample, seed_after
from megatron_grpo.engines.choice import Choice
from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.engines.dispatch import RequestDispatcher
from megatron_grpo.engines.engine import Json
from megatron_grpo.engines.generation import Generation
from megatron_grpo.workers.child_process import COLLECTOR
from megatron_grpo.workers.tasks import run_with

Decode = Callable[[Sequence[int]], str]
"""The text of sampled tokens, without special ones."""

MOST_REQUESTS = 1 << 32
"""More than a generation has."""


def rest_of(request: Json, begun: Choice) -> Json:
    """The request for the rest of a completion, of which `begun` was sampled before it was cut."""
    params, num_tokens = request["sampling_params"], len(begun.token_ids)
    return {
        **request,
        "token_ids": [*request["token_ids"], *begun.token_ids],
        "sampling_params": {
            **params,
            "max_tokens": params["max_tokens"] - num_tokens,
            # The same seed would repeat the random numbers that have sampled these tokens.
            "seed": seed_after(params["seed"], num_tokens),
        },
    }


def whole(begun: Choice, end: Choice, decode: Decode) -> Choice:
    """The completion that was cut after `begun`, and ends with `end`."""
    # Of a character whose bytes are tokens on both sides, neither part has the text.
    token_ids = begun.token_ids + end.token_ids
    return begun.followed_by(
        end, decode(token_ids[:-1] if end.finish_reason == "stop" else token_ids)
    )


class OpenGenerations:
    """The open requests of several generations, as those of one; earlier generations go first."""

    are_movable = True

    def __init__(self, decode: Decode) -> None:
        self.policy_version = 0
        """Version of the weights that the engines hold."""
        self._decode = decode
        self._generations: dict[int, tuple[Generation, asyncio.Future[None]]] = {}

    @property
    def open(self) -> dict[int, Json]:
        """Unanswered requests for whole completions, or for the rest of those that were cut."""
        return {
            number: request
            for generation in sorted(self._generations)
            for number, request in self.open_of(generation).items()
        }

    def open_of(self, generation: int) -> dict[int, Json]:
        """Those of one generation."""
        requests, _ = self._generations[generation]
        first, found = generation * MOST_REQUESTS, {}
        for own_number, request in requests.open.items():
            begun, number = requests.begun.get(own_number), first + own_number
            rest = rest_of(request, begun) if begun else request
            found[number] = {**rest, "priority": number}
        return found

    async def answered(self, generation: int, requests: Generation) -> None:
        """Wait until all `requests` of a generation are answered."""
        future = asyncio.get_running_loop().create_future()
        self._generations[generation] = requests, future
        try:
            await future
        finally:
            del self._generations[generation]

    async def give_up(self, generations: Iterable[int]) -> None:
        """Cancel those who wait for any of these that is not answered yet."""
        waiting = {number for number in generations if number in self._generations}
        for number in waiting:
            self._generations[number][1].cancel()
        while waiting & self._generations.keys():
            await asyncio.sleep(0)

    def fail(self, error: Exception) -> None:
        """Raise `error` for all who wait; they may come again."""
        for _, future in self._generations.values():
            if not future.done():
                future.set_exception(error)

    async def wait_for_environments(self) -> None:
        """Nothing to wait for."""

    def keep(self, number: int, choice: Choice) -> None:
        """Keep what was sampled of a completion until it was cut."""
        if not choice.token_ids:
            return
        generation, own_number = divmod(number, MOST_REQUESTS)
        requests, _ = self._generations[generation]
        if begun := requests.begun.get(own_number):
            choice = begun.followed_by(choice, text="")
        requests.begun[own_number] = choice

    async def take_answer(self, number: int, choice: Choice, url: str) -> Json | None:
        """Pass the whole completion on to its generation."""
        generation, own_number = divmod(number, MOST_REQUESTS)
        requests, future = self._generations[generation]
        if begun := requests.begun.get(own_number):
            choice = whole(begun, choice, self._decode)
        await requests.take_answer(own_number, choice, url)
        if not requests.open:
            future.set_result(None)
        return None


class InFlight:
    """Has the engines answer several generations at once, but for the time of a push.

    It begins suspended. A thread of its own talks to the engines; it lasts until `close`, since
    Linux ends an engine with the thread that has started it.
    """

    def __init__(self, client: RolloutClient, decode: Decode) -> None:
        self._client = client
        self._generations = OpenGenerations(decode)
        self._dispatcher: RequestDispatcher | None = None
        self._ended: Exception | None = None
        self._lost: Exception | None = None
        """Why the engines were asked for nothing more, until `suspend`."""
        self._loop = asyncio.new_event_loop()
        self._may_dispatch, self._is_idle = asyncio.Event(), asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=COLLECTOR)
        self._thread.submit(self._loop.run_forever)
        self._running = asyncio.run_coroutine_threadsafe(self._run(), self._loop)

    def generate(self, generation: int, requests: Generation) -> list[Sample]:
        """All samples of `requests`, once they are answered; called by one thread of each
        generation.

        Raises NoServingEngine when no engine is left: `suspend`, push, `resume`, and call again.
        Raises Preempted once the client was cancelled.
        """
        self.submit(generation, requests).result()
        return requests.samples()

    def submit(
        self, generation: int, requests: Generation, *, together: bool = False
    ) -> Future[None]:
        """As `generate`, without waiting: the result is there when all `requests` are answered.

        With `together`, one engine gets all of them: they share their prompt.
        """
        asked = self._generate(generation, requests, together)
        return asyncio.run_coroutine_threadsafe(asked, self._loop)

    def give_up(self, generations: Iterable[int]) -> None:
        """Cancel those of these submissions that are not answered yet, between `suspend` and
        `resume`."""
        given_up = self._generations.give_up(generations)
        asyncio.run_coroutine_threadsafe(given_up, self._loop).result()

    def suspend(self) -> None:
        """Return when no request is at any engine; what is submitted from now on waits for
        `resume`."""
        asyncio.run_coroutine_threadsafe(self._suspend(), self._loop).result()

    def resume(self, policy_version: int) -> None:
        """Go on, with weights of that version."""

        def resume() -> None:
            self._generations.policy_version = policy_version
            self._may_dispatch.set()

        self._loop.call_soon_threadsafe(resume)

    def end(self) -> None:
        """Cancel the client, and take no notice of engines from now on."""
        self._client.cancel()
        self._running.result()

    def close(self) -> None:
        """End the thread, after `end` and after the engines that it started."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.shutdown()
        self._loop.close()

    async def _generate(self, generation: int, requests: Generation, together: bool) -> None:
        if failure := self._ended or self._lost:
            raise failure
        answered = asyncio.ensure_future(self._generations.answered(generation, requests))
        await asyncio.sleep(0)  # now it is among the open ones
        if self._dispatcher:
            self._dispatcher.add(self._generations.open_of(generation), together=together)
        await answered

    async def _suspend(self) -> None:
        self._may_dispatch.clear()
        if self._dispatcher:
            self._dispatcher.cut()
        await self._is_idle.wait()
        self._lost = None

    async def _run(self) -> None:
        try:
            async with run_with(self._client.raise_when_cancelled()):
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
                self._client.pool, self._client.connect, generations, generations.keep
            )
            await self._dispatcher.run()
            self._client.pool.finish_generation()  # engines that served from push to push
        except Exception as error:  # of any kind: it must reach who waits for the samples
            self._may_dispatch.clear()
            self._lost = error
            generations.fail(error)
        finally:
            self._dispatcher = None
