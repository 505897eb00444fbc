"""Batch arithmetic: the completions of each optimizer step.

Sizes count completions over all ranks and have the names of TRL and ms-swift. A generation of
`generation_batch_size` completions, `num_generations` per prompt, is split into
`steps_per_generation` minibatches, each the batch of one optimizer step. It is trained on
`num_iterations` times before the next generation. No torch here: a config is checked before
anything starts.
"""

import random
from dataclasses import dataclass

from megatron_grpo.config.grpo import GRPOConfig
from parallel import divisors


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """Position of one optimizer step: a minibatch of a generation, in one pass over it."""

    generation: int
    iteration: int
    minibatch: int

    @property
    def starts_generation(self) -> bool:
        return self.iteration == 0 and self.minibatch == 0


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """The four batch sizes, checked against each other; everything else follows from them."""

    num_generations: int
    generation_batch_size: int
    steps_per_generation: int = 1
    num_iterations: int = 1
    keep_groups_together: bool = False
    """Keep the completions of a prompt in one minibatch, as far as they fit."""

    def __post_init__(self) -> None:
        if self.generation_batch_size % self.num_generations:
            raise ValueError(
                f"grpo.generation_batch_size {self.generation_batch_size} is not a multiple of "
                f"grpo.num_generations {self.num_generations}: use "
                f"{_multiples_around(self.generation_batch_size, self.num_generations)}"
            )
        if self.generation_batch_size % self.steps_per_generation:
            legal = divisors(self.generation_batch_size)
            nearest = sorted(legal, key=lambda d: abs(d - self.steps_per_generation))[:2]
            raise ValueError(
                f"grpo.generation_batch_size {self.generation_batch_size} cannot be split into "
                f"grpo.steps_per_generation {self.steps_per_generation} equal optimizer batches: "
                f"use {' or '.join(map(str, sorted(nearest)))} steps"
            )

    @staticmethod
    def of(grpo: GRPOConfig) -> "BatchSchedule":
        """The schedule of a config; raises ValueError with the numbers if the sizes do not fit."""
        return BatchSchedule(
            num_generations=grpo.num_generations,
            generation_batch_size=grpo.generation_batch_size,
            steps_per_generation=grpo.steps_per_generation,
            num_iterations=grpo.num_iterations,
            keep_groups_together=grpo.shared_prompts,
        )

    @property
    def num_prompts(self) -> int:
        """Prompts per generation."""
        return self.generation_batch_size // self.num_generations

    @property
    def minibatch_size(self) -> int:
        """Completions per optimizer step."""
        return self.generation_batch_size // self.steps_per_generation

    @property
    def updates_per_generation(self) -> int:
        """Optimizer steps per generation. With 1 the ratio is always 1 and nothing is clipped."""
        return self.steps_per_generation * self.num_iterations

    def cursor(self, step: int) -> Cursor:
        """Position of optimizer step `step`, counted from 0."""
        generation, update = divmod(step, self.updates_per_generation)
        iteration, minibatch = divmod(update, self.steps_per_generation)
        return Cursor(generation=generation, iteration=iteration, minibatch=minibatch)

    def saves_after(self, step: int, interval: int) -> bool:
        """Whether a checkpoint is due after `step` steps: at the first end of a generation at or
        after each multiple of `interval`."""
        return self.cursor(step).starts_generation and step % interval < self.updates_per_generation

    def minibatches(self, generation: int, seed: int) -> list[list[int]]:
        """Completions of each minibatch: ascending indices into the generation, each once.

        Every pass over the generation uses the same minibatches, which depend on the arguments
        alone.
        """
        # Dealt at random, as in TRL, so that a minibatch does not consist of a few prompts. The
        # seed is a string, which Python hashes alike in every version and process.
        together = self.num_generations if self.keep_groups_together else 1
        dealt = list(range(self.generation_batch_size // together))
        random.Random(f"minibatches {seed} {generation}").shuffle(dealt)
        order = [first * together + i for first in dealt for i in range(together)]
        size = self.minibatch_size
        return [sorted(order[i : i + size]) for i in range(0, len(order), size)]


def _multiples_around(n: int, factor: int) -> str:
    below = n // factor * factor
    return f"{below} or {below + factor}" if below else f"{factor}"
