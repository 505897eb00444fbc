"""Advantages of completions relative to their group (one prompt), or to the batch.

A NaN reward marks an unscored completion: every mean and standard deviation leaves it out, and its
advantage is 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_grpo.config.grpo import ScaleRewards

EPSILON = 1e-4
"""Added to every standard deviation before dividing by it, as in TRL and ms-swift."""

ROUNDING = 1e-9
"""Relative tolerance for equal rewards: sums of the same scores, rounded differently."""

StepRewards = Sequence[tuple[int, float]]
"""Step rewards of one completion: (index of the step's last token, reward) each."""


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    scale_rewards: ScaleRewards = "group",
    *,
    estimator: str = "grpo",
    epsilon: float = EPSILON,
) -> Tensor:
    """Advantages [N] in float64 of N completions in complete groups, which may differ in size.

    Let n, m and s be the size, mean and sample standard deviation (as in TRL and ms-swift) of a
    completion's group, and M the mean over all N. Before scaling, the advantage is:

    - grpo: ``r - m`` (arXiv 2402.03300, section 4.1.2);
    - rloo: r minus the mean of the others, ``n / (n - 1) (r - m)`` (arXiv 2402.14740);
    - reinforce_plus_plus: ``r - M`` (arXiv 2501.03262), which also works with one completion per
      prompt;
    - reinforce_plus_plus_baseline: ``r - m`` (the same paper); ms-swift calls it
      reinforce_plus_plus.

    It is then divided by s + `epsilon` for "group", by the standard deviation over the batch +
    `epsilon` for "batch" (arXiv 2508.08221), or not at all for "none" (Dr. GRPO, arXiv 2503.20783).
    The batch's standard deviation is taken over rewards, or over unscaled advantages (whitening)
    for the two reinforce_plus_plus estimators.

    A group of equal rewards has advantage exactly 0, unless it is compared with the batch.

    `rewards` [N] are finite or NaN; `group_ids` [N] int64 are equal for the completions of one
    prompt, in any order.
    """
    valid = _valid(rewards)
    advantages = torch.zeros(len(rewards), dtype=torch.float64)
    if not valid.any():
        return advantages
    groups = RewardGroups(rewards[valid], group_ids[valid])
    centered = CENTERED[estimator](groups)
    if scale_rewards == "group":
        centered = centered / (groups.std()[groups.index] + epsilon)
    elif scale_rewards == "batch":
        whitened = estimator.startswith("reinforce")
        spread = _std(centered if whitened else groups.rewards)
        centered = centered / (spread + epsilon)
    advantages[valid] = centered
    return advantages


def _by_group(groups: "RewardGroups") -> Tensor:
    # Equal rewards may differ from their rounded mean: only the mask makes advantages exactly 0.
    return groups.centered.masked_fill(~groups.has_reward_variance[groups.index], 0.0)


def _by_others(groups: "RewardGroups") -> Tensor:
    # r - (sum - r) / (n - 1) = n / (n - 1) (r - m)
    n = groups.count.double()
    return _by_group(groups) * (n / (n - 1).clamp(min=1))[groups.index]


def _by_batch(groups: "RewardGroups") -> Tensor:
    if not differ(groups.rewards.min(), groups.rewards.max()):
        return torch.zeros_like(groups.rewards)
    return groups.rewards - groups.rewards.mean()


CENTERED = {
    "grpo": _by_group,
    "rloo": _by_others,
    "reinforce_plus_plus": _by_batch,
    "reinforce_plus_plus_baseline": _by_group,
}
"""Rewards minus the baseline of each `grpo.advantage_estimator`. To add one: its function, a line
here and in `SCALE_REWARDS`, and its formula in tests/helpers/oracle/grpo.py."""


def normalized_sum_advantages(scores: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Advantages [N] from separately normalised rewards: GDPO, arXiv 2601.05242.

    `scores` [N, F] of each reward function are normalised within their group (minus the mean,
    divided by the standard deviation), summed with `weights` [F], and whitened over the batch.
    """
    valid = _valid(scores.sum(dim=1))
    advantages = torch.zeros(len(scores), dtype=torch.float64)
    if not valid.any():
        return advantages
    columns = [group_advantages(column, group_ids[valid]) for column in scores[valid].T]
    summed = torch.stack(columns, dim=1) @ weights.double()
    if differ(summed.min(), summed.max()):
        advantages[valid] = (summed - summed.mean()) / (_std(summed) + EPSILON)
    return advantages


def process_advantages(
    step_rewards: Sequence[StepRewards],
    lengths: Sequence[int],
    group_ids: Tensor,
) -> list[Tensor]:
    """Per-token advantages under process supervision: DeepSeekMath, arXiv 2402.03300, 4.1.3.

    Rewards of all steps of a group are normalised together. The advantage of a token is the sum of
    the normalised rewards of steps that end at or after it.

    For N completions: `step_rewards`, `lengths` in tokens, and `group_ids` [N] int64, equal for one
    prompt. Returns N tensors [length] in float64.
    """
    flat = [
        (owner, token, reward)
        for owner, steps in enumerate(step_rewards)
        for token, reward in steps
    ]
    owners = torch.tensor([owner for owner, _, _ in flat], dtype=torch.int64)
    rewards = torch.tensor([reward for _, _, reward in flat], dtype=torch.float64)
    normalized = group_advantages(rewards, group_ids[owners])
    at_token = [torch.zeros(length, dtype=torch.float64) for length in lengths]
    for (owner, token, _), reward in zip(flat, normalized, strict=True):
        at_token[owner][token] += reward
    # A sum from the end: each token gets the rewards of its own step and of later steps.
    return [rewards.flip(0).cumsum(0).flip(0) for rewards in at_token]


def differ(low: Tensor, high: Tensor) -> Tensor:
    """Whether rewards differ by more than `ROUNDING`, relative to the larger one or to 1."""
    return high - low > ROUNDING * torch.maximum(low.abs(), high.abs()).clamp(min=1.0)


class RewardGroups:
    """Rewards of N completions in G groups, in float64, with statistics of each group.

    `index` [N]: group (0 .. G-1) of each completion; `centered` [N]: reward minus the group's mean;
    `count` and `has_reward_variance`: [G].
    """

    def __init__(self, rewards: Tensor, group_ids: Tensor) -> None:
        self.rewards = rewards.double()
        _, self.index, self.count = torch.unique(group_ids, return_inverse=True, return_counts=True)
        mean = self._fold(self.rewards, "sum") / self.count
        self.centered = self.rewards - mean[self.index]
        # From the rewards: a computed standard deviation of equal numbers can be tiny but nonzero.
        low, high = self._fold(self.rewards, "amin"), self._fold(self.rewards, "amax")
        self.has_reward_variance = differ(low, high)

    def std(self) -> Tensor:
        """Sample standard deviation [G]; exactly 0 where all rewards are equal."""
        squares = self._fold(self.centered.square(), "sum")
        std = (squares / (self.count - 1).clamp(min=1)).sqrt()
        return std.masked_fill(~self.has_reward_variance, 0.0)

    def _fold(self, values: Tensor, how: str) -> Tensor:
        empty = values.new_empty(len(self.count))
        return empty.scatter_reduce(0, self.index, values, how, include_self=False)


def _valid(rewards: Tensor) -> Tensor:
    assert not rewards.isinf().any(), "rewards must be finite or NaN, not infinite"
    return ~rewards.isnan()


def _std(values: Tensor) -> float:
    return float(values.std()) if len(values) > 1 else 0.0
