"""Makes generations, in the calling thread or in the background. Rank 0 only.

Decides which generation the engines make, when, and with which weights.

In a synchronous run a generation is requested when its first step begins, and all ranks wait. With
`rollout.async_generate`, generation g + 1 is requested as soon as the engines serve the weights
with which the training on g begins, and is made while the ranks train. No weights are pushed before
it is complete: all samples of a generation come from one version, the weights at the beginning of
the training on the previous generation.

Requests of rank 0 to the engines, made collective so that all ranks can push weights again.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.config.config import Config
from megatron_grpo.engines import EngineError, EnginesLost, EnginesOut
from megatron_grpo.environments import EnvironmentsLost
from megatron_grpo.launch.process import Preempted, preempted_instead
from megatron_grpo.rewards import RewardError
from megatron_grpo.rollout.generate import Collected, ExperienceSource
from megatron_grpo.timing import BETWEEN, ROLLOUT, WAIT, PhaseTimer, Timeline
from megatron_grpo.watchdog import Watch


@contextmanager
def as_engines_lost(what: str) -> Iterator[None]:
    """Turn a failure of `what` in the block into EnginesLost, on which all ranks save and stop."""
    try:
        yield
    except (EnginesOut, EnginesLost):
        raise
    except (RewardError, TimeoutError, EngineError, EnvironmentsLost) as error:
        raise EnginesLost(f"{what} failed: {error}") from error


@dataclass(frozen=True)
class Asked:
    """A generation that was requested from the engines."""

    generation: int
    policy_version: int
    """Version of the weights that the engines serve meanwhile."""


class Collector:
    """Makes one generation at a time with the `source`.

    With a `thread` it is made there while the caller does something else. That thread must live as
    long as the source: when it ends, Linux ends the processes that it started, such as engines.
    """

    def __init__(
        self,
        source: ExperienceSource,
        thread: ThreadPoolExecutor | None,
        watch: Watch,
        timeline: Timeline,
    ) -> None:
        self._source, self._thread = source, thread
        self._watch, self._timeline = watch, timeline
        self._asked: Asked | None = None
        self._making: Future[Collected] | None = None
        self._changed = threading.Condition()
        self._phase, self._is_over = BETWEEN, True

    def begin(self, asked: Asked) -> None:
        """Request this generation; with a thread, start making it there."""
        self._asked = asked
        if self._thread:
            self._phase, self._is_over = BETWEEN, False
            self._making = self._thread.submit(self._make, asked)

    def wait(self, timer: PhaseTimer) -> Collected:
        """Wait for the requested generation and return it; without a thread, make it here.

        Raises EnginesOut if engines may come back, and EnginesLost for any other failure, so that
        the run saves what it has learnt before it ends; Preempted instead of these if the scheduler
        wants the machine back. The watch is told which phase is waited for, as each has its limit.
        """
        assert self._asked is not None
        with (
            preempted_instead(lambda: self._watch.is_preempted),
            as_engines_lost(f"generation {self._asked.generation}"),
        ):
            return self._made(self._asked, timer)

    def _made(self, asked: Asked, timer: PhaseTimer) -> Collected:
        if self._making is None:
            return self._source.collect(asked.generation, asked.policy_version, timer)
        is_over = False
        while not is_over:
            with self._changed:
                phase = self._phase
            with timer.phase(WAIT, phase), self._changed:
                self._changed.wait_for(lambda: self._phase != phase or self._is_over)  # noqa: B023
                is_over = self._is_over
        return self._making.result()

    def close(self) -> None:
        """Cancel a generation in progress, since its source is about to be closed."""
        if not self._is_over:
            self._source.cancel()
            with self._changed:
                self._changed.wait_for(lambda: self._is_over)

    def _make(self, asked: Asked) -> Collected:
        """Make the generation, in the thread; its metrics include the seconds it took."""

        def record(name: str, began: float, seconds: float) -> None:
            self._timeline.add(name, began, seconds, ROLLOUT, **asdict(asked))

        timer = PhaseTimer(self._enter, record)
        try:
            made = self._source.collect(asked.generation, asked.policy_version, timer)
            seconds = timer.metrics()
            del seconds["time/step"]
            return replace(made, metrics={**made.metrics, **seconds})
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _enter(self, phase: str) -> None:
        with self._changed:
            self._phase = phase
            self._changed.notify_all()


T = TypeVar("T")

ANSWERED, OUT, PREEMPTED, LOST = range(4)


def ask_engines(ask: Callable[[], T] | None, push: Callable[[], None]) -> T | None:
    """Return what `ask` returns on rank 0, and None on the other ranks.

    Collective over the default group; only rank 0 passes an `ask`, which must use engines that hold
    the current weights. If no engine serves any more, all ranks `push` the current weights, which
    waits for an engine to come back, and rank 0 asks again. The other ranks wait on the CPU: a GPU
    that waits in a collective is busy, and it may be the one that has to generate.

    Raises on all ranks: Preempted if rank 0 was told to stop, and EnginesLost if `ask` or `push`
    raises it.
    """
    while True:
        answer, outcome, lost = None, ANSWERED, EnginesLost("rank 0 says why generation ended")
        try:
            answer = ask() if ask else None
        except EnginesOut:
            outcome = OUT
        except Preempted:
            outcome = PREEMPTED
        except EnginesLost as error:
            outcome, lost = LOST, error
        told = torch.tensor([outcome])
        dist.broadcast(told, src=0)
        if told == PREEMPTED:
            raise Preempted("the generation was given up")
        if told == LOST:
            raise lost
        if told == ANSWERED:
            return answer
        push()


class RolloutPipeline:
    """At most one finished generation that awaits training, and at most one in progress.

    Every rank has a pipeline and all call the same method at the same time, so that all know what
    is in progress; only rank 0 has a `collector`. `push(step)` pushes the weights after `step`
    optimizer steps to the engines.
    """

    def __init__(
        self, cfg: Config, collector: Collector | None, push: Callable[[int], None]
    ) -> None:
        self.pending: Asked | None = None
        """The generation in progress; the engines must keep their weights meanwhile."""
        self.ready: int | None = None
        """Number of the finished generation that training has not started on."""
        self.collected: Collected | None = None
        """That generation itself, on rank 0."""
        self._is_async = cfg.rollout.async_generate
        self._batches, self._num_steps = BatchSchedule.of(cfg.grpo), cfg.train.num_steps
        self._collector, self._push = collector, push

    def ask(self, generation: int, step: int) -> None:
        """Request a generation from the engines, which serve the weights after `step` steps."""
        assert self.pending is None, f"the engines are at {self.pending}"
        self.pending = Asked(generation, step)
        if self._collector:
            self._collector.begin(self.pending)

    def ask_ahead(self, step: int) -> None:
        """In an asynchronous run, request the generation after that of `step`, if training goes
        that far and it was not requested before."""
        following = self._batches.cursor(step).generation + 1
        is_last = following * self._batches.updates_per_generation >= self._num_steps
        if self._is_async and not self.pending and self.ready != following and not is_last:
            self.ask(following, step)

    def settle(self, step: int, timer: PhaseTimer) -> None:
        """Wait for the generation in progress, if any; collective.

        If no engine is left, the current weights, after `step` steps, are pushed and the generation
        is requested again from them. Raises Preempted or EnginesLost on all ranks, which gives the
        generation up.
        """
        if self.pending is None:
            return
        generation = self.pending.generation

        def push_and_ask() -> None:
            self._push(step)
            self.pending = None
            self.ask(generation, step)

        wait = partial(self._collector.wait, timer) if self._collector else None
        try:
            self.collected = ask_engines(wait, push_and_ask)
            self.ready = generation
        finally:
            self.pending = None

    def settle_to_save(self, step: int, timer: PhaseTimer) -> None:
        """Wait before a checkpoint after `step` steps if the generation in progress uses weights
        that the checkpoint does not hold: a resumed run could not request it again."""
        if self.pending and self.pending.policy_version != step:
            self.settle(step, timer)

    def restore(self, generation: int, collected: Collected | None) -> None:
        """Restore from a checkpoint a generation that training has not started on."""
        self.ready, self.collected = generation, collected

    def take(self) -> Collected | None:
        """Remove the finished generation and, on rank 0, return it."""
        taken, self.ready, self.collected = self.collected, None, None
        return taken
