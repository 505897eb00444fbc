"""The trainer's side of the rollout engines: prompts out and samples back, new weights out."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

from checkpoint_convert.vllm import EngineReport
from megatron_grpo.config.rollout_config import RolloutConfig
from megatron_grpo.launch.preemption import Preempted
from megatron_grpo.rollout.connection import connect
from megatron_grpo.rollout.engine import Engine, Json, Patience
from megatron_grpo.rollout.engine_error import EngineDown, EngineError, EnginesOut, EngineStale
from megatron_grpo.rollout.fleet import Fleet
from megatron_grpo.rollout.generation import Requests
from megatron_grpo.rollout.push_check import WorkerSums, check_reports
from megatron_grpo.rollout.samples import Sample
from megatron_grpo.rollout.tasks import beside, together

POLL_SECONDS = 0.1

T = TypeVar("T")


class RolloutClient:
    """Speaks vLLM's HTTP routes with all engines of a fleet at once.

    An engine that fails is lost to the fleet, and the others go on: a generation at once, a push
    from its start. Errors that no other engine would cure are raised, and name the engine:
    EngineError when its answer is not what was asked for, TimeoutError when it is well and has not
    answered within `rollout.request_timeout`.

    A push is for the engines that `assemble` found; who fails in it is asked nothing more, and is
    lost when the next one assembles.
    """

    def __init__(self, fleet: Fleet, rollout: RolloutConfig) -> None:
        self.fleet = fleet
        self._rollout = rollout
        self._is_cancelled = False
        self._chain: list[tuple[str, int]] = []
        self._num_chains = 0
        self._failed: dict[str, EngineDown] = {}
        self._links = ""

    def generate(self, generation: Requests) -> list[Sample]:
        """All samples of `generation`, once every request of it is answered.

        Requests are dealt to the engines that serve in contiguous equal shares, and what follows a
        request goes to the engine that has answered it. What an engine that
        is lost has not answered is dealt to those that are left when these are done with their own.
        Raises EnginesOut when none is left: what was answered by then counts when it is called
        again. Raises Preempted once `cancel` was called.
        """

        async def until_answered() -> None:
            async with beside(self._raise_when_cancelled()):
                await generation.settle()
                while generation.open:
                    await self._deal(generation)
                    await generation.settle()

        asyncio.run(until_answered())
        self.fleet.finish_generation()
        return generation.samples()

    def cancel(self) -> None:
        """End a running `generate`, and all that waits for engines, soon; from any thread."""
        self._is_cancelled = True

    async def _raise_when_cancelled(self) -> NoReturn:
        while not self._is_cancelled:
            await asyncio.sleep(POLL_SECONDS)
        raise Preempted("the generation was given up")

    async def _deal(self, generation: Requests) -> None:
        """Ask the engines that serve for all that is open."""
        serving = self.fleet.serving
        if not serving:
            raise EnginesOut(f"no rollout engine serves:\n{self.fleet.account()}")
        shares = equal_shares([*generation.open.items()], len(serving))

        async def generate_on(url: str, share: Mapping[int, Json]) -> None:
            try:
                async with self._connect(url) as engine:
                    await engine.generate(share, generation.policy_version, generation.take)
            except EngineStale as error:
                self.fleet.leave_out(url, str(error))
            except EngineDown as error:
                self.fleet.lose(url, str(error))

        await together(
            generate_on(url, dict(share)) for url, share in zip(serving, shares, strict=True)
        )

    def assemble(self, check: Callable[[list[EngineReport]], None]) -> tuple[int, int]:
        """Find the engines that the next push is for: all that are well.

        Those that come back take part when `check`, which may raise ValueError, finds in what their
        workers hold no fault. While one is well, no other is waited for; else one is, for
        `rollout.startup_timeout` seconds, after which EnginesLost says how each ended.

        Returns the number of engines, and a number that is new when they are others than before.
        """
        for url, error in self._failed.items():
            self.fleet.lose(url, str(error))
        self._failed = {}
        deadline = time.monotonic() + self._rollout.startup_timeout
        while not self._find_well(check):
            if self._is_cancelled:
                raise Preempted("the wait for an engine was given up")
            self.fleet.check_hope(deadline)
            time.sleep(POLL_SECONDS)
        if self._chain != self.fleet.up:
            self._chain = self.fleet.up
            self._num_chains += 1
        return len(self._chain), self._num_chains

    def _find_well(self, check: Callable[[list[EngineReport]], None]) -> bool:
        for url in self.fleet.check_members():
            try:
                [workers] = self._on([url], _describe, {})
                check(workers)
            except (EngineError, ValueError) as error:  # whatever answers there now is no use to us
                self.fleet.lose(url, str(error))
            else:
                self.fleet.welcome(url)
        return bool(self.fleet.up)

    def describe_parameters(self) -> dict[str, list[EngineReport]]:
        """Shape and dtype of the parameters of every worker, by the engine's address."""
        urls = [url for url, _ in self.fleet.up]
        return dict(zip(urls, self._on(urls, _describe, {}), strict=True))

    def connect(self, invitation: Json, is_sending: Callable[[], bool]) -> None:
        """Have every worker of every engine make the links that `invitation` is for.

        Returns when all have made them or have failed, which `check_push` tells; those who send
        must make theirs meanwhile, and `is_sending` say until when they are at it.
        """
        self._links = links = uuid.uuid4().hex
        urls = self._urls

        async def connect(engine: Engine) -> None:
            await engine.connect(invitation, urls.index(engine.url), links)

        self._on_all(connect, is_sending)

    def begin_push(self, push: str) -> None:
        """Pause the engines; from here on they hold no version, and drop what they have cached."""
        self.fleet.begin_push(self._urls)
        self._on_all(lambda engine: engine.begin_push(push, self._links))

    def receive_push(self, push: str, is_sending: Callable[[], bool]) -> None:
        """Have every worker receive its shard; returns when all have, or have failed."""
        self._on_all(lambda engine: engine.ask("receive_push", push=push), is_sending)

    def check_push(self, push: str, expected: Sequence[WorkerSums] | None) -> None:
        """Raise EngineError unless each worker of every engine has loaded `push` and holds weights
        of the checksums in `expected`, one for each worker of an engine, unless it is None."""
        reports = self._on_all(lambda engine: engine.ask("push_report"))
        check_reports(self._urls, reports, push, expected)

    def finish_push(self, push: str, policy_version: int) -> None:
        """Have every engine serve `push` as `policy_version`."""
        self._on_all(lambda engine: engine.finish_push(push, policy_version))
        self._on_all(lambda engine: engine.post("/resume"))
        self.fleet.finish_push(self._urls)

    def serve_loaded(self) -> None:
        """Have every engine serve, as LOADED_VERSION, what it has loaded itself."""
        self._on_all(lambda engine: engine.serve_loaded())
        self.fleet.finish_push(self._urls)

    @property
    def _urls(self) -> list[str]:
        return [url for url, _ in self._chain]

    def _on_all(
        self,
        action: Callable[[Engine], Coroutine[Any, Any, T]],
        is_sending: Callable[[], bool] = lambda: False,
    ) -> list[T]:
        """What all engines of the push return; the first failure ends the others.

        While something is sent to them they may take their time: that has a limit of its own.
        """
        for error in self._failed.values():
            raise error
        return self._on(self._urls, action, self._failed, is_sending)

    def _on(
        self,
        urls: Sequence[str],
        action: Callable[[Engine], Coroutine[Any, Any, T]],
        failed: dict[str, EngineDown],
        is_sending: Callable[[], bool] = lambda: False,
    ) -> list[T]:
        def progress() -> float:
            return time.monotonic() if is_sending() else 0.0

        async def on(url: str) -> T:
            try:
                async with self._connect(url) as engine, beside(engine.watch(progress)):
                    return await action(engine)
            except TimeoutError as error:
                failed[url] = EngineDown(str(error))
                raise failed[url] from error
            except EngineDown as error:
                failed[url] = error
                raise

        return asyncio.run(together(map(on, urls)))

    @asynccontextmanager
    async def _connect(self, url: str) -> AsyncIterator[Engine]:
        rollout = self._rollout
        patience = Patience(rollout.health_timeout, rollout.stall_timeout)
        async with connect(
            url, self.fleet.token, rollout.request_timeout, rollout.health_timeout
        ) as http:
            yield Engine(url, http, patience)


async def _describe(engine: Engine) -> list[EngineReport]:
    answers = await engine.ask("describe_parameters")
    return [answer["parameters"] for answer in answers]


def equal_shares(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """`items` cut into `count` contiguous parts whose sizes differ by one at most."""
    bounds = [len(items) * part // count for part in range(count + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]
