"""Which generation the engines are asked for, when, and with which weights.

In a synchronous run a generation is asked for when its first step begins, and all ranks wait. With
`rollout.async_generate` generation g + 1 is asked for as soon as the engines serve the weights that
g is trained on with at first, and is made while the ranks train. No weights are pushed before it is
there: all samples of a generation are of one version, and that is the one at the begin of the
generation before.
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
    """A generation that waits for its turn, and the one that is in the making: each one at most.

    Every rank has one, and all call the same method at the same time, so that all know what is
    under way; rank 0 alone has a `collector`. `push` brings the weights, as of that many optimizer
    steps, into the engines.
    """

    def __init__(
        self, cfg: Config, collector: Collector | None, push: Callable[[int], None]
    ) -> None:
        self.pending: Asked | None = None
        """What the engines are at: they must keep their weights meanwhile."""
        self.ready: int | None = None
        """The generation that is there and that nobody has begun to train on."""
        self.collected: Collected | None = None
        """The same, on rank 0."""
        self._is_async = cfg.rollout.async_generate
        self._batches, self._num_steps = BatchSchedule.of(cfg.grpo), cfg.train.num_steps
        self._collector, self._push = collector, push

    def ask(self, generation: int, step: int) -> None:
        """Have the engines, which serve the weights after `step` steps, make a generation."""
        assert self.pending is None, f"the engines are at {self.pending}"
        self.pending = Asked(generation, step)
        if self._collector:
            self._collector.begin(self.pending)

    def ask_ahead(self, step: int) -> None:
        """The same for the generation behind the one of `step`, which is at hand, where there is
        one and it is to be made beside the training."""
        following = self._batches.cursor(step).generation + 1
        is_last = following * self._batches.updates_per_generation >= self._num_steps
        if self._is_async and not self.pending and self.ready != following and not is_last:
            self.ask(following, step)

    def settle(self, step: int, timer: PhaseTimer) -> None:
        """Wait for what is in the making; collective.

        Where no engine is left, the weights are pushed, which by now are those after `step` steps,
        and the generation is asked for from these. Raises Preempted and EnginesLost on all ranks:
        it is given up then.
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
        """The same before a checkpoint after `step` steps, where nobody could ask for it again:
        of weights that the checkpoint does not hold."""
        if self.pending and self.pending.policy_version != step:
            self.settle(step, timer)

    def restore(self, generation: int, collected: Collected | None) -> None:
        """Take what a checkpoint has of a generation that nobody has begun to train on."""
        self.ready, self.collected = generation, collected

    def take(self) -> Collected | None:
        """Hand out, on rank 0, the generation that is ready."""
        taken, self.ready, self.collected = self.collected, None, None
        return taken
