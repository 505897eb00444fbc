"""Which generation the engines make, when, and from which weights.

In a synchronous run a generation is requested when its first step begins, and all ranks wait. With
`rollout.async_generate`, generation g + 1 is requested as soon as the engines serve the weights
with which the training on g begins, and is made while the ranks train. No weights are pushed before
it is complete: all samples of a generation come from one version, the weights at the beginning of
the training on the previous generation.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import asdict, replace
from queue import SimpleQueue
from typing import TypeVar

from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.config.config import Config
from megatron_grpo.engines import EngineError, NoServingEngine, RolloutAborted
from megatron_grpo.environments import EnvironmentsLost
from megatron_grpo.launch.process import Preempted, preempted_instead
from megatron_grpo.rewards import RewardError
from megatron_grpo.rollout.generate import Rollout, RolloutBatch, Rollouter, RolloutRequest
from megatron_grpo.rollout.replay import Replay, ReplayedRollout
from megatron_grpo.timing import IDLE, ROLLOUT, WAIT, PhaseTimer, Timeline
from megatron_grpo.watchdog import Watchdog
from parallel.collectives import on_rank_0

Z = TypeVar("Z")
T = TypeVar("T")

STOPS = (Preempted, NoServingEngine, RolloutAborted)
"""What all ranks raise together when rank 0 does."""


def ask_engines(zero: Z | None, ask: Callable[[Z], T], push: Callable[[], None]) -> T | None:
    """Return what `ask(zero)` returns on rank 0, which alone has `zero`, and None on the others.

    `ask` must use engines that hold the current weights. If none serves any more, all ranks `push`
    these, which waits for an engine to come back, and rank 0 asks again. Collective; raises
    Preempted and RolloutAborted on all ranks.
    """
    while True:
        try:
            return on_rank_0(zero, ask, STOPS)
        except NoServingEngine:
            push()


@contextmanager
def as_rollout_aborted(what: str) -> Iterator[None]:
    """Turn a failure of `what` in the block into RolloutAborted: all ranks save and stop."""
    try:
        yield
    except (NoServingEngine, RolloutAborted):
        raise
    except (RewardError, TimeoutError, EngineError, EnvironmentsLost) as error:
        raise RolloutAborted(f"{what} failed: {error}") from error


class RolloutRunner:
    """Makes one generation at a time, in the rollouter's thread if it has one. Rank 0 only."""

    def __init__(
        self, rollouter: Rollouter | Replay, watchdog: Watchdog, timeline: Timeline
    ) -> None:
        self._rollouter, self._watchdog, self._timeline = rollouter, watchdog, timeline
        self._rollout: Rollout | ReplayedRollout | None = None
        self._making: Future[RolloutBatch] | None = None
        self._phases: SimpleQueue[str | None] = SimpleQueue()
        """The phases that the thread enters; None when it is done."""

    def begin(self, request: RolloutRequest) -> None:
        """Begin a generation, or continue it if it is the one that engines were lost in."""
        if self._rollout is None or self._rollout.request != request:
            if self._rollout is not None:
                self._rollout.abandon()
            self._rollout = self._rollouter.rollout(request)
        if thread := self._rollouter.thread:
            self._making = thread.submit(self._make, self._rollout)

    def finish(self, timer: PhaseTimer) -> RolloutBatch:
        """Wait for the generation and return it; without a thread, make it here.

        Raises NoServingEngine if engines may come back, and RolloutAborted for any other failure,
        so that the run saves what it has learnt before it ends; Preempted instead of these if the
        scheduler wants the machine back.
        """
        assert self._rollout is not None
        with (
            preempted_instead(lambda: self._watchdog.is_preempted),
            as_rollout_aborted(f"generation {self._rollout.request.generation}"),
        ):
            made = self._wait(self._making, timer) if self._making else self._rollout.run(timer)
        self._rollout = self._making = None
        return made

    def close(self) -> None:
        """Cancel a generation in progress, since its rollouter is about to be closed."""
        if self._making is not None:
            self._rollouter.cancel()
            wait([self._making])

    def _wait(self, making: Future[RolloutBatch], timer: PhaseTimer) -> RolloutBatch:
        """The result of the thread; the watchdog is told its phases, as each has its own limit."""
        phase: str | None = IDLE
        while phase is not None:
            with timer.phase(WAIT, phase):
                phase = self._phases.get()
            while not self._phases.empty():  # all but the phase that is going on
                phase = self._phases.get()
        return making.result()

    def _make(self, rollout: Rollout | ReplayedRollout) -> RolloutBatch:
        """Make the generation, in the thread; its metrics include the seconds it took."""

        def record(name: str, began: float, seconds: float) -> None:
            self._timeline.add(name, began, seconds, ROLLOUT, **asdict(rollout.request))

        timer = PhaseTimer(self._phases.put, record)
        try:
            made = rollout.run(timer)
            seconds = timer.metrics()
            del seconds["time/step"]
            return replace(made, metrics={**made.metrics, **seconds})
        finally:
            self._phases.put(None)


class RolloutScheduler:
    """At most one finished generation that awaits training, and at most one in progress.

    Every rank has a scheduler and all call the same method at the same time, so that all know what
    is in progress; only rank 0 has a `runner`. `push(step)` pushes the weights after `step`
    optimizer steps to the engines.
    """

    def __init__(
        self, cfg: Config, runner: RolloutRunner | None, push: Callable[[int], None]
    ) -> None:
        self.pending: RolloutRequest | None = None
        """The generation in progress; the engines must keep their weights meanwhile."""
        self.ready_generation: int | None = None
        """Number of the finished generation that training has not started on."""
        self.batch: RolloutBatch | None = None
        """That generation itself, on rank 0."""
        self._is_async = cfg.rollout.async_generate
        self._schedule, self._num_steps = BatchSchedule.of(cfg.grpo), cfg.num_steps
        self._runner, self._push = runner, push

    def request(self, generation: int, step: int) -> None:
        """Request a generation from the engines, which serve the weights after `step` steps."""
        assert self.pending is None, f"the engines are at {self.pending}"
        self.pending = RolloutRequest(generation, step)
        if self._runner:
            self._runner.begin(self.pending)

    def request_ahead(self, step: int) -> None:
        """In an asynchronous run, request the generation after that of `step`, if training goes
        that far and it was not requested before."""
        following = self._schedule.cursor(step).generation + 1
        is_last = following * self._schedule.updates_per_generation >= self._num_steps
        if (
            self._is_async
            and not self.pending
            and self.ready_generation != following
            and not is_last
        ):
            self.request(following, step)

    def finish_pending(self, step: int, timer: PhaseTimer) -> None:
        """Wait for the generation in progress, if any; collective.

        If no engine is left, the current weights, after `step` steps, are pushed and the generation
        is requested again from them. Raises Preempted or RolloutAborted on all ranks, which gives
        the generation up.
        """
        if self.pending is None:
            return
        generation = self.pending.generation

        def push_and_request() -> None:
            self._push(step)
            self.pending = None
            self.request(generation, step)

        try:
            self.batch = ask_engines(
                self._runner, lambda runner: runner.finish(timer), push_and_request
            )
            self.ready_generation = generation
        finally:
            self.pending = None

    def finish_for_save(self, step: int, timer: PhaseTimer) -> None:
        """Wait before a checkpoint after `step` steps if the generation in progress uses weights
        that the checkpoint does not hold: a resumed run could not request it again."""
        if self.pending and self.pending.policy_version != step:
            self.finish_pending(step, timer)

    def restore(self, generation: int, batch: RolloutBatch | None) -> None:
        """Restore from a checkpoint a generation that training has not started on."""
        self.ready_generation, self.batch = generation, batch

    def take_ready(self) -> RolloutBatch | None:
        """Remove the finished generation and, on rank 0, return it."""
        taken, self.ready_generation, self.batch = self.batch, None, None
        return taken
