"""Schedule of generations: when each is requested, and from which weights it is made.

In a synchronous run a generation is requested when its first step begins, and all ranks wait. With
`rollout.max_staleness` K, generations g + 1 to g + K are requested as soon as the engines serve the
weights with which training on g begins; they are made while the ranks train.

K = 1 pushes no weights before the next generation is complete: all of its samples have one version,
the weights at the beginning of training on the previous generation. With
`rollout.in_flight_updates` completions go on under new weights after a push. Tokens of generation
g + K are never older than the weights with which training on g began, because g + K is requested
only then.
"""

from collections.abc import Callable

from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.config.config import Config
from megatron_grpo.engines.http import NoServingEngine, RolloutAborted
from megatron_grpo.launch.process import Preempted
from megatron_grpo.rollout.generation import RolloutBatch, Runner
from megatron_grpo.rollout.saved_groups import may_be_saved
from megatron_grpo.timing import PhaseTimer
from parallel.collectives import on_rank_0

STOPS = (Preempted, NoServingEngine, RolloutAborted)
"""Errors of rank 0 that all ranks raise."""


def ask_engines[Z, T](zero: Z | None, ask: Callable[[Z], T], push: Callable[[], None]) -> T | None:
    """Return `ask(zero)` on rank 0, where alone `zero` is set, and None on other ranks.

    When no engine serves, all ranks `push` the current weights, which waits for an engine to come
    back, and rank 0 asks again. Collective; raises Preempted and RolloutAborted on all ranks.
    """
    while True:
        try:
            return on_rank_0(zero, ask, STOPS)
        except NoServingEngine:
            push()


class RolloutScheduler:
    """Generations in progress, and finished generations that await training.

    All ranks call the same method at the same time, so that all know the generations in progress;
    only rank 0 has a `runner`. `push(step)` pushes the weights after `step` optimizer steps.
    """

    def __init__(self, cfg: Config, runner: Runner | None, push: Callable[[int], None]) -> None:
        self.pending: dict[int, int] = {}
        """Generations in progress, each with the optimizer step of the weights at its request."""
        self.ready: dict[int, RolloutBatch | None] = {}
        """Finished generations that training has not begun, by number; None except on rank 0."""
        rollout, self._max_staleness = cfg.rollout, cfg.rollout.max_staleness
        self._in_flight, self._saves_open = rollout.in_flight_updates, may_be_saved(cfg)
        # SGLang cannot return the experts of a completion that a push has just interrupted: before
        # the push of a saved step, all requests are aborted.
        replays = self._saves_open and rollout.router_replay
        self._abort_interval = cfg.train.save_interval if replays else 0
        self._schedule, self._num_steps = BatchSchedule.of(cfg.grpo), cfg.num_steps
        self._runner, self._push, self._is_suspended = runner, push, False

    def request_ahead(self, step: int) -> None:
        """Request the next `max_staleness` generations that are not pending, ready, or past the
        end."""
        now = self._schedule.cursor(step).generation
        for generation in range(now + 1, now + 1 + self._max_staleness):
            is_beyond = generation * self._schedule.updates_per_generation >= self._num_steps
            if not (is_beyond or generation in self.pending or generation in self.ready):
                self._request(generation, step)

    def await_generation(self, generation: int, step: int, timer: PhaseTimer) -> None:
        """Wait until a generation is ready, and request it if it is not in progress; collective."""
        if generation not in self.pending and generation not in self.ready:
            self._request(generation, step)
        # Before the wait: engines would be idle while the last completions are made.
        if self._in_flight:
            self.request_ahead(step)
        self._finish(generation, step, timer)

    def before_push(self, step: int, timer: PhaseTimer, *, aborts: bool = False) -> None:
        """Wait until the weights after `step` steps may be pushed; with `aborts`, engines give up
        all requests before. Raises Preempted or RolloutAborted on all ranks, and drops the failed
        generation."""
        if not self._in_flight:
            for generation in [*self.pending]:
                self._finish(generation, step, timer)
        elif self._runner:
            interval = self._abort_interval
            with timer.phase("push"):
                if aborts or (interval and self._schedule.saves_after(step, interval)):
                    self._runner.abort()
                else:
                    self._runner.pause(step)
        self._is_suspended = self._in_flight

    def after_push(self, step: int) -> None:
        self._is_suspended = False
        if self._in_flight and self._runner:
            self._runner.resume(step)

    def finish_for_save(self, step: int, timer: PhaseTimer) -> None:
        """Before a checkpoint after `step` steps, wait for generations of earlier weights: a
        resumed run does not have these weights and could not request the generations again."""
        # The checkpoint holds unfinished samples, or no engine works: the save is within a push.
        if self._saves_open or self._is_suspended:
            return
        for generation, version in [*self.pending.items()]:
            if version != step:
                self._finish(generation, step, timer)

    def give_up(self) -> None:
        """Forget generations in progress; the resumed run requests them again."""
        self.pending = {}

    def _request(self, generation: int, step: int) -> None:
        self.pending[generation] = step
        if self._runner:
            self._runner.begin(generation, step)

    def _finish(self, generation: int, step: int, timer: PhaseTimer) -> None:
        """Wait for a generation in progress. When no engine is left, push the current weights; then
        the generation continues, or is requested again if its samples must have one version."""
        if generation in self.ready:
            return

        def push_and_request() -> None:
            if self._in_flight:
                self.before_push(step, timer)
            self._push(step)
            if self._in_flight:
                self.after_push(step)
            else:
                self._request(generation, step)

        try:
            self.ready[generation] = ask_engines(
                self._runner, lambda runner: runner.finish(generation, timer), push_and_request
            )
        finally:  # after a failure, too: a save must not wait for the generation
            del self.pending[generation]
