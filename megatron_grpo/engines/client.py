"""The trainer's client of the rollout engines: requests samples and pushes new weights."""

import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from checkpoint_convert.vllm import EngineReport
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engine_weights.protocol import PushFailed, WorkerSums, check_reports
from megatron_grpo.engines.engine import Engine, Json
from megatron_grpo.engines.http import EngineDown, EngineError, http_client
from megatron_grpo.engines.pool import EnginePool
from megatron_grpo.engines.vllm.args import NO_ADAPTERS
from megatron_grpo.launch.process import Preempted
from megatron_grpo.workers.event_loop import EventLoop
from megatron_grpo.workers.tasks import gather_all, run_with
from parallel.clock import running_time

POLL_SECONDS = 0.1


class RolloutClient:
    """Talks to all engines of a pool at once, over vLLM's HTTP routes: health and pushes.

    A `RequestRouter` requests completions in the same `loop`, over the same connections.

    An engine that fails or answers late (`rollout.request_timeout`) is lost: generations go on with
    the others, a push starts over without it, and the next `update_health` counts the loss. A wrong
    answer is an EngineError: another engine would give it, too.
    """

    def __init__(
        self,
        pool: EnginePool,
        rollout: RolloutConfig,
        loop: EventLoop,
        lora: LoraConfig = NO_ADAPTERS,
        *,
        keeps_features: bool = True,
    ) -> None:
        self.pool, self.loop = pool, loop
        self._rollout, self._lora, self._keeps_features = rollout, lora, keeps_features
        self.is_cancelled = False
        self._push_engines: dict[str, int] = {}
        """Engines of the push, in the order of their indices: `EnginePool.up` when it began."""
        self._push_engines_id = 0
        self._awake: set[str] = set()
        """Engines whose channels this run has opened before: no earlier run left them asleep."""
        self._failed: dict[str, EngineDown] = {}
        self._channels = ""
        self._engines: dict[str, Engine] = {}

    def cancel(self) -> None:
        """End the routers' requests and `await_engines` soon; safe from any thread."""
        self.is_cancelled = True

    def update_health(self, check: Callable[[list[EngineReport]], None]) -> None:
        """Drop engines that failed, died, hang or leave; add engines that join or came back, unless
        `check` raises ValueError for the parameters of their workers."""
        self.pool.finish_generation()  # engines that have served since the last push
        for url, error in self._failed.items():
            self.pool.mark_dead(url, str(error))
        self._failed = {}
        self.pool.join_and_leave()
        for url in self.pool.check_engines():
            try:
                [workers] = self._on_all(_describe, urls=[url])
                check(workers)
            except (EngineError, ValueError) as error:  # whatever answers there now is unusable
                self.pool.mark_dead(url, str(error))
            else:
                self.pool.mark_recovered(url)

    def await_engines(self, check: Callable[[list[EngineReport]], None]) -> tuple[int, int]:
        """Choose the engines for the next push: all that the last `update_health` found healthy.

        Waits for a first one up to `rollout.startup_timeout` seconds, then raises RolloutAborted.
        Returns their number, and an id that changes when an engine joins, leaves or restarts.
        """
        deadline = running_time() + self._rollout.startup_timeout
        while not self.pool.up:
            if self.is_cancelled:
                raise Preempted("the wait for an engine was given up")
            self.pool.raise_if_all_dead(deadline)
            time.sleep(POLL_SECONDS)
            self.update_health(check)
        # As lists: channels know an engine by its index, and equal dicts may differ in order.
        if [*self._push_engines.items()] != [*self.pool.up.items()]:
            self._push_engines = self.pool.up
            self._push_engines_id += 1
        return len(self._push_engines), self._push_engines_id

    def describe_parameters(self) -> dict[str, list[EngineReport]]:
        """Parameter shapes and dtypes of every worker, by engine address."""
        urls = [*self.pool.up]
        return dict(zip(urls, self._on_all(_describe, urls=urls), strict=True))

    def open_channels(self, transfer: Json, is_sending: Callable[[], bool]) -> None:
        """Make every worker of every engine open the channels described by `transfer`.

        Returns when all have connected or failed, as `check_push` reports. The senders connect at
        the same time; `is_sending` returns True until they are done.
        """
        self._channels = channels = uuid.uuid4().hex
        urls = [*self._push_engines]

        async def open_channels(engine: Engine) -> None:
            # The first time only: an earlier run may have left it asleep. Waking an engine that is
            # awake lets it continue with its requests, which it must hold while a push in flight is
            # repeated.
            if not self._rollout.enable_sleep_mode and engine.url not in self._awake:
                await engine.wake()
            await engine.open_channels(transfer, urls.index(engine.url), channels)

        self._on_all(open_channels, is_sending)
        self._awake.update(urls)

    def begin_push(self, push: str) -> None:
        """Pause the engines, drop their caches and mark their weights as having no version."""
        # First: a push that fails midway leaves no engine serving.
        self.pool.lose_weights(self._push_engines)
        if self._rollout.enable_sleep_mode:
            self._on_all(lambda engine: engine.wake("weights"))
        self._on_all(partial(Engine.begin_push, push=push, channels=self._channels))

    def receive_push(self, push: str, is_sending: Callable[[], bool]) -> None:
        """Make every worker receive its shard; returns when all have finished or failed."""
        self._on_all(partial(Engine.ask_workers, call="receive_push", push=push), is_sending)

    def check_push(self, push: str, expected: Sequence[WorkerSums] | None) -> None:
        """Raise PushFailed unless every worker of every engine has loaded `push`, with the
        checksums `expected` of each worker, if given.

        An engine that has joined is lost if its checksums differ: the run can do without it.
        """
        reports = self._on_all(partial(Engine.ask_workers, call="push_report"))
        try:
            check_reports([*self._push_engines], reports, push, expected)
        except PushFailed as failure:
            for url in filter(self.pool.has_joined, failure.faults if expected else ()):
                self._failed[url] = EngineDown(failure.faults[url][0])
            raise

    def finish_push(self, push: str, policy_version: int) -> None:
        """Make every engine serve `push` as `policy_version`."""
        self._on_all(partial(Engine.finish_push, push=push, policy_version=policy_version))
        if self._rollout.enable_sleep_mode:
            # Not with the weights: ranks on the same GPUs hold memory of their own during a push.
            self._on_all(lambda engine: engine.wake("kv_cache"))
        self._on_all(partial(Engine.post, route="/resume"))
        self.pool.finish_push(self._push_engines)

    def sleep(self) -> None:
        """Make every engine that answers give its memory to the trainer, until the next push.

        Waits for lost engines that may be starting, until `cancel`: they would take their memory
        when the trainer needs it. Raises ValueError if an engine cannot sleep.
        """
        # With the number of losses: an engine that restarts meanwhile is put to sleep again.
        asleep: set[tuple[str, int]] = set()
        while True:
            came_back = self.pool.check_engines()
            self.pool.lose_weights(self.pool.up)
            lives = [life for life in (came_back | self.pool.up).items() if life not in asleep]
            sleeps = self.loop.call(gather_all(self._put_to_sleep(url) for url, _ in lives))
            asleep.update(life for life, is_asleep in zip(lives, sleeps, strict=True) if is_asleep)
            if self.is_cancelled or asleep.issuperset(self.pool.starting.items()):
                return
            time.sleep(POLL_SECONDS)

    async def _put_to_sleep(self, url: str) -> bool:
        try:
            engine = self.engine(url)
            async with run_with(engine.watch(lambda: None)):
                await engine.sleep()
        except (EngineError, TimeoutError) as error:
            self.pool.mark_dead(url, str(error))
            return False
        return True

    def serve_loaded(self) -> None:
        """Make every engine serve the weights of its own folder, as LOADED_VERSION."""
        self._on_all(Engine.serve_loaded)
        self.pool.finish_push(self._push_engines)

    def _on_all[T](
        self,
        action: Callable[[Engine], Coroutine[Any, Any, T]],
        is_sending: Callable[[], bool] = lambda: False,
        urls: Sequence[str] | None = None,
    ) -> list[T]:
        """Run `action` on the engines of the push, or on `urls`; the first failure cancels the
        others, and on an engine of the push makes later phases raise.

        While `is_sending`, a busy engine does not count as hung: transfers have their own limit.
        """
        failed = self._failed if urls is None else {}
        for error in failed.values():  # an earlier phase lost an engine: the push must start over
            raise error

        async def on(url: str) -> T:
            try:
                engine = self.engine(url)
                watch = engine.watch(lambda: running_time() if is_sending() else 0.0)
                async with run_with(watch):
                    return await action(engine)
            except TimeoutError as error:
                failed[url] = EngineDown(str(error))
                raise failed[url] from error
            except EngineDown as error:
                failed[url] = error
                raise

        return self.loop.call(gather_all(map(on, self._push_engines if urls is None else urls)))

    def engine(self, url: str) -> Engine:
        """The engine at `url`, with its connections; for calls in the loop."""
        if url not in self._engines:
            rollout = self._rollout
            self._engines[url] = Engine(
                url,
                http_client(url, self.pool.token, rollout.request_timeout, rollout.health_timeout),
                rollout.health_timeout,
                rollout.stall_timeout,
                serves_adapter=self._lora.is_served,
                keeps_caches=not rollout.recompute_kv_cache,
                keeps_features=self._keeps_features,
            )
        return self._engines[url]

    def close(self) -> None:
        engines, self._engines = [*self._engines.values()], {}
        self.loop.call(gather_all(engine.http.close() for engine in engines))


async def _describe(engine: Engine) -> list[EngineReport]:
    answers = await engine.ask_workers("describe_parameters")
    return [answer["parameters"] for answer in answers]


@contextmanager
def meanwhile(action: Callable[[Callable[[], bool]], None] | None) -> Iterator[None]:
    """Run rank 0's `action` on the engines concurrently with the block.

    `action` gets a function that is True while the block runs. An error of `action` replaces the
    block's, which is only a broken channel when an engine dies.
    """
    if action is None:
        yield
        return
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(action, lambda: not is_over.is_set())
        try:
            yield
        finally:
            is_over.set()
            done.result()
