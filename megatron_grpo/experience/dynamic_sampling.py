"""Replacing prompts that teach nothing: dynamic sampling (DAPO, arXiv 2503.14476, section 3.2).

A group whose rewards are all equal has no advantage. With ``grpo.dynamic_sample`` its prompt is
replaced by another one, up to ``grpo.max_resample_times`` times; what then is missing are groups of
equal rewards after all, so that a generation always has its size.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_grpo.config.grpo_config import GRPOConfig
from megatron_grpo.data.prompts import Prompt, PromptStream
from megatron_grpo.rollout.samples import Sample


@dataclass(frozen=True)
class ScoredGroup:
    """The samples of one prompt, what each reward function gave them, and the weighted sums."""

    samples: Sequence[Sample]
    rewards: Sequence[dict[str, float]]
    totals: Sequence[float]

    @property
    def has_spread(self) -> bool:
        """Whether two of the samples that could be scored have different rewards."""
        return len({total for total in self.totals if not math.isnan(total)}) > 1


class Search:
    """The groups of one generation: those that are found, and the prompts to be tried next.

    A function of the number of the generation and of the rewards, so that a run that is repeated
    tries the same prompts.
    """

    def __init__(self, stream: PromptStream, generation: int, cfg: GRPOConfig) -> None:
        self.round = 0
        """How many times prompts were replaced."""
        self.prompts: Sequence[Prompt] = stream.batch(generation)
        """Of this round; none when all is found."""
        self.num_failed = 0
        """Samples so far that could not be scored, of prompts that were replaced as well."""
        self.num_scored = 0
        """All samples so far, these among them."""
        self._stream, self._generation, self._cfg = stream, generation, cfg
        self._found: list[ScoredGroup] = []
        self._equal: list[ScoredGroup] = []
        self._tried = {prompt.index for prompt in self.prompts}

    @property
    def num_replaced(self) -> int:
        """Prompts that others have taken the place of, or have tried to."""
        return len(self._tried) - self._stream.batch_size

    def take(self, groups: Sequence[ScoredGroup]) -> None:
        """Go on to the next round with the groups of all `prompts` of this one."""
        for group in groups:
            self.num_failed += sum(map(math.isnan, group.totals))
            self.num_scored += len(group.totals)
            keeps = group.has_spread or not self._cfg.dynamic_sample
            (self._found if keeps else self._equal).append(group)
        missing = self._stream.batch_size - len(self._found)
        self.prompts = []
        if missing and self.round < self._cfg.max_resample_times:
            self.round += 1
            self.prompts = self._others(missing)
            self._tried |= {prompt.index for prompt in self.prompts}

    def groups(self) -> list[ScoredGroup]:
        """As many as a generation has prompts; the last ones may be of equal rewards."""
        return [*self._found, *self._equal][: self._stream.batch_size]

    def _others(self, count: int) -> list[Prompt]:
        """Prompts that were not tried, as many as there are of `count`."""
        untried = [prompt for prompt in self._stream.prompts if prompt.index not in self._tried]
        order = random.Random(f"resampled {self._stream.seed} {self._generation} {self.round}")
        return order.sample(untried, min(count, len(untried)))
