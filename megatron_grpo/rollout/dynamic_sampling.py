"""Replacing prompts that teach nothing: dynamic sampling (DAPO, arXiv 2503.14476, section 3.2).

A group whose rewards are all equal has advantage 0. With ``grpo.dynamic_sample`` such prompts are
replaced by others in up to ``grpo.max_resample_times`` rounds. Each round lasts as long as its
longest completion: ``grpo.dynamic_sample_oversampling`` tries more prompts than are missing, so
that fewer rounds are needed. A generation that is still too small is filled up with groups of equal
rewards, so that its size is always the same.

DAPO compares accuracies, not total rewards: a length penalty would give most all-wrong groups
different totals. ``grpo.dynamic_sample_reward`` names the term to compare.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from megatron_grpo.algorithm.advantages import differ
from megatron_grpo.config.grpo import GRPOConfig
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample
from megatron_grpo.data.stream import PromptStream


@dataclass(frozen=True)
class ScoredGroup:
    """The samples of one prompt, their score by each reward function, and the weighted sums."""

    samples: Sequence[Sample]
    rewards: Sequence[dict[str, float]]
    totals: Sequence[float]

    def has_reward_variance(self, term: str | None) -> bool:
        """Whether any two samples that could be scored differ in this term; None: in the total."""
        values = self.totals if term is None else [reward[term] for reward in self.rewards]
        scored = torch.tensor(values, dtype=torch.float64)
        scored = scored[~torch.tensor(self.totals, dtype=torch.float64).isnan()]
        return len(scored) > 0 and bool(differ(scored.min(), scored.max()))


class DynamicSampler:
    """The search for the groups of one generation: the groups found, and the prompts to try next.

    Which prompts are tried depends only on the generation's number and the rewards, so a repeated
    run tries the same ones.
    """

    def __init__(self, stream: PromptStream, generation: int, cfg: GRPOConfig) -> None:
        self.round = 0
        """Number of replacement rounds so far."""
        self.prompts: Sequence[Prompt] = stream.batch(generation)
        """Prompts of this round; empty when the search is over."""
        self._stream, self._generation, self._cfg = stream, generation, cfg
        self._found: list[ScoredGroup] = []
        self._equal: list[ScoredGroup] = []
        self._tried = {prompt.index for prompt in self.prompts}
        self._totals: list[float] = []
        """Rewards of all samples so far, including those of replaced prompts."""

    @property
    def num_failed(self) -> int:
        """Samples so far that could not be scored."""
        return sum(map(math.isnan, self._totals))

    @property
    def num_scored(self) -> int:
        """All samples so far, including those that could not be scored."""
        return len(self._totals)

    @property
    def num_replaced(self) -> int:
        """Number of replacement prompts that were tried."""
        return len(self._tried) - self._stream.batch_size

    @property
    def unfiltered(self) -> dict[str, float]:
        """Mean reward and share of groups of equal rewards, over all groups that were tried."""
        num_equal = len(self._equal)
        return {
            "reward": fmean(total for total in self._totals if not math.isnan(total)),
            "frac_reward_zero_std": num_equal / (num_equal + len(self._found)),
        }

    def add_groups(self, groups: Sequence[ScoredGroup]) -> None:
        """Add the groups of all `prompts` of this round, and choose those of the next one."""
        for group in groups:
            self._totals += group.totals
            has_reward_variance = group.has_reward_variance(self._cfg.dynamic_sample_reward)
            keeps = has_reward_variance or not self._cfg.dynamic_sample
            (self._found if keeps else self._equal).append(group)
        missing = self._stream.batch_size - len(self._found)
        self.prompts = []
        if missing > 0 and self.round < self._cfg.max_resample_times:
            self.round += 1
            self.prompts = self._others(math.ceil(missing * self._cfg.dynamic_sample_oversampling))
            self._tried |= {prompt.index for prompt in self.prompts}

    def groups(self) -> list[ScoredGroup]:
        """The groups of the generation, one per prompt; the last ones may have equal rewards."""
        return [*self._found, *self._equal][: self._stream.batch_size]

    def replaced(self) -> list[ScoredGroup]:
        """The groups that are not part of the generation."""
        return [*self._found, *self._equal][self._stream.batch_size :]

    def _others(self, count: int) -> list[Prompt]:
        """Up to `count` prompts that were not tried yet."""
        order = random.Random(f"resampled {self._stream.seed} {self._generation} {self.round}")
        return self._stream.others(self._tried, count, order)
