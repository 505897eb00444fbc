"""Advantage of each completion over the other completions of its prompt."""

from typing import Literal

import torch
from torch import Tensor

ScaleRewards = Literal["group", "batch", "none"]


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    scale_rewards: ScaleRewards = "group",
    *,
    correction: int = 1,
    epsilon: float = 1e-4,
) -> Tensor:
    """Advantages [N] in float64 of N completions, whole groups together.

    With m and s the mean and standard deviation of a completion's group:
    ``(r - m) / (s + epsilon)`` for "group" (GRPO, arXiv 2402.03300, section 4.1.2), the same with s
    over all N rewards for "batch" (arXiv 2508.08221), ``r - m`` for "none" (Dr. GRPO, arXiv
    2503.20783). A group whose rewards are all equal has advantage exactly 0: spread is found by
    comparing, since the std of equal numbers rounds to something tiny that would be divided by.

    Args:
        rewards: [N], finite.
        group_ids: [N] int64, equal for the completions of one prompt, in any order.
        scale_rewards: what the advantage is divided by.
        correction: 1 for the sample standard deviation, as TRL and ms-swift; 0 for the
            population's, as the paper's own example.
        epsilon: added to the standard deviation; 1e-4 in TRL and ms-swift.
    """
    assert bool(torch.isfinite(rewards).all()), "a reward that is not finite must not get here"
    groups = RewardGroups(rewards, group_ids)
    advantages = (groups.rewards - groups.mean[groups.index]).masked_fill(
        ~groups.has_spread[groups.index], 0.0
    )
    if scale_rewards == "none":
        return advantages
    if scale_rewards == "group":
        return advantages / (groups.std(correction)[groups.index] + epsilon)
    spread = groups.rewards.std(correction=correction) if len(rewards) > correction else 0.0
    return advantages / (spread + epsilon)


class RewardGroups:
    """Rewards by group, in float64: G groups over N completions.

    `index` [N] is the group (0 .. G-1) of each completion; `mean` and `has_spread` are [G].
    """

    def __init__(self, rewards: Tensor, group_ids: Tensor) -> None:
        self.rewards = rewards.double()
        _, self.index, self.count = torch.unique(group_ids, return_inverse=True, return_counts=True)
        self.mean = self._sum(self.rewards) / self.count
        low, high = (self._fold(self.rewards, how) for how in ("amin", "amax"))
        self.has_spread = low != high

    def std(self, correction: int = 1) -> Tensor:
        """Standard deviation [G]; exactly 0 where all rewards are equal, as in a group of one."""
        squares = self._sum((self.rewards - self.mean[self.index]) ** 2)
        std = (squares / (self.count - correction).clamp(min=1)).sqrt()
        return std.masked_fill(~self.has_spread, 0.0)

    def _sum(self, values: Tensor) -> Tensor:
        return self._fold(values, "sum")

    def _fold(self, values: Tensor, how: str) -> Tensor:
        empty = values.new_empty(len(self.count))
        return empty.scatter_reduce(0, self.index, values, how, include_self=False)
