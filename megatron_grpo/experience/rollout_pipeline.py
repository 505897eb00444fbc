"""Decides which generation the engines make, when, and with which weights.

In a synchronous run a generation is requested when its first step begins, and all ranks wait. With
`rollout.async_generate`, generation g + 1 is requested as soon as the engines serve the weights
with which the training on g begins, and is made while the ranks train. No weights are pushed before
it is complete: all samples of a generation come from one version, the weights at the beginning of
the training on the previous generation.
"""

from collections.abc import Callable
from functools import partial

from megatron_grpo.config.config import Config
from megatron_grpo.experience.ask_engines import ask_engines
from megatron_grpo.experience.batching import BatchSchedule
from megatron_grpo.experience.collector import Asked, Collector
from megatron_grpo.experience.experience_source import Collected
from megatron_grpo.timing import PhaseTimer


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
