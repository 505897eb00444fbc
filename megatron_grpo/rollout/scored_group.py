"""Groups with their scores, and what is counted of them.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) replaces groups whose rewards are all equal,
and so have advantage 0. DAPO compares accuracies, not total rewards: a length penalty would give
most all-wrong groups different totals. ``grpo.dynamic_sample_reward`` names the term to compare.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch

from megatron_grpo.algorithm.advantages import differ
from megatron_grpo.batch.experience import Experience, compute_advantages
from megatron_grpo.config.config import Config
from megatron_grpo.config.grpo import GRPOConfig
from megatron_grpo.config.reward import RewardConfig
from megatron_grpo.data.samples import Sample
from megatron_grpo.rewards.scoring import check_failed


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


@dataclass
class Tally:
    """The groups that were scored, also those that no generation takes."""

    totals: list[float] = field(default_factory=list)
    """Rewards of all samples, NaN for those that could not be scored."""
    num_groups: int = 0
    num_equal: int = 0
    """Groups without `has_reward_variance`."""

    def add(self, group: ScoredGroup, cfg: GRPOConfig) -> bool:
        """Count a group; returns whether dynamic sampling replaces it."""
        is_equal = not group.has_reward_variance(cfg.dynamic_sample_reward)
        self.totals += group.totals
        self.num_groups += 1
        self.num_equal += is_equal
        return cfg.dynamic_sample and is_equal

    @property
    def num_failed(self) -> int:
        """Samples that could not be scored."""
        return sum(map(math.isnan, self.totals))

    def check_failed(self, cfg: RewardConfig) -> None:
        """Raise RewardError if that are too many."""
        check_failed(self.num_failed, len(self.totals) or 1, cfg)

    def metrics(self, num_replaced: int, cfg: GRPOConfig) -> dict[str, float]:
        """Metrics of a generation for which `num_replaced` other prompts were tried."""
        metrics: dict[str, float] = {"reward/failed": self.num_failed}
        if cfg.dynamic_sample and self.num_groups:
            metrics["rollout/num_resampled_prompts"] = num_replaced
            scored = [total for total in self.totals if not math.isnan(total)]
            metrics["unfiltered/reward"] = fmean(scored) if scored else 0.0
            metrics["unfiltered/frac_reward_zero_std"] = self.num_equal / self.num_groups
        return metrics


def as_experience(groups: Sequence[ScoredGroup], cfg: Config) -> Experience:
    """The generation that the groups are, with its advantages."""
    return compute_advantages(
        [sample for group in groups for sample in group.samples],
        [reward for group in groups for reward in group.rewards],
        [total for group in groups for total in group.totals],
        cfg,
    )
