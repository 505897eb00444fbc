"""Advantage of each completion over the other completions of its prompt, or of its batch.

A reward that is NaN, of a completion that could not be scored, takes part in no mean and no
standard deviation; its advantage is 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_grpo.config.grpo_config import AdvantageEstimator, ScaleRewards

EPSILON = 1e-4
"""Added to every standard deviation that divides; as TRL and ms-swift."""

StepRewards = Sequence[tuple[int, float]]
"""Rewards of the steps of one completion, each with the index of the step's last token."""


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    scale_rewards: ScaleRewards = "group",
    *,
    estimator: AdvantageEstimator = "grpo",
    epsilon: float = EPSILON,
) -> Tensor:
    """Advantages [N] in float64 of N completions, whole groups together; groups of any sizes.

    With n, m and s the size, mean and standard deviation of a completion's group (the sample's, as
    TRL and ms-swift), and M the mean over all N, an advantage is, before it is scaled:

    - grpo: ``r - m`` (arXiv 2402.03300, section 4.1.2);
    - rloo: r less the mean of the others, ``n / (n - 1) (r - m)`` (arXiv 2402.14740);
    - reinforce_plus_plus: ``r - M`` (arXiv 2501.03262), for which one completion of each
      prompt is enough;
    - reinforce_plus_plus_baseline: ``r - m`` (the same paper); ms-swift calls it
      reinforce_plus_plus.

    It is divided, `epsilon` added, by s for "group", by the standard deviation over the batch for
    "batch" (arXiv 2508.08221), by nothing for "none" (Dr. GRPO, arXiv 2503.20783). That over the
    batch is of the rewards; of the unscaled advantages for the last two, which so are whitened. A
    group whose rewards are all equal has advantage exactly 0, unless it is compared with the batch:
    spread is found by comparing, since the std of equal numbers rounds to something tiny that would
    be divided by.

    Args:
        rewards: [N], finite or NaN.
        group_ids: [N] int64, equal for the completions of one prompt, in any order.
        scale_rewards: what the advantage is divided by.
        estimator: what the reward is compared with.
        epsilon: added to the standard deviation.
    """
    valid = _valid(rewards)
    advantages = torch.zeros(len(rewards), dtype=torch.float64)
    if not valid.any():
        return advantages
    groups = RewardGroups(rewards[valid], group_ids[valid])
    centered = _centered(groups, estimator)
    if scale_rewards == "group":
        centered = centered / (groups.std()[groups.index] + epsilon)
    elif scale_rewards == "batch":
        whitened = estimator.startswith("reinforce")
        spread = _std(centered if whitened else groups.rewards)
        centered = centered / (spread + epsilon)
    advantages[valid] = centered
    return advantages


def _centered(groups: "RewardGroups", estimator: AdvantageEstimator) -> Tensor:
    if estimator == "reinforce_plus_plus":
        equal = groups.rewards.min() == groups.rewards.max()
        return torch.zeros_like(groups.rewards) if equal else groups.rewards - groups.rewards.mean()
    centered = (groups.rewards - groups.mean[groups.index]).masked_fill(
        ~groups.has_spread[groups.index], 0.0
    )
    if estimator == "rloo":
        n = groups.count.double()
        centered = centered * (n / (n - 1).clamp(min=1))[groups.index]
    return centered


def normalized_sum_advantages(scores: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Advantages [N] from rewards that are normalized each for itself: GDPO, arXiv 2601.05242.

    Every reward function's `scores` [N, F] less their group's mean, by their group's standard
    deviation; their sum by `weights` [F]; that sum whitened over the batch.
    """
    valid = _valid(scores.sum(dim=1))
    advantages = torch.zeros(len(scores), dtype=torch.float64)
    if not valid.any():
        return advantages
    columns = [group_advantages(column, group_ids[valid]) for column in scores[valid].T]
    summed = torch.stack(columns, dim=1) @ weights.double()
    if summed.min() != summed.max():
        advantages[valid] = (summed - summed.mean()) / (_std(summed) + EPSILON)
    return advantages


def process_advantages(
    step_rewards: Sequence[StepRewards],
    lengths: Sequence[int],
    group_ids: Tensor,
) -> list[Tensor]:
    """Advantage of every token under process supervision: DeepSeekMath, arXiv 2402.03300, 4.1.3.

    The rewards of all steps of a group are normalized together, and a token has the sum of those of
    the steps that end at it or after it.

    Args:
        step_rewards: for each of the N completions, the rewards of its steps.
        lengths: [N] tokens of each completion.
        group_ids: [N] int64, equal for the completions of one prompt.

    Returns:
        N tensors [length] in float64.
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
    return [rewards.flip(0).cumsum(0).flip(0) for rewards in at_token]


class RewardGroups:
    """Rewards by group, in float64: G groups over N completions.

    `index` [N] is the group (0 .. G-1) of each completion; `count`, `mean` and `has_spread` are
    [G].
    """

    def __init__(self, rewards: Tensor, group_ids: Tensor) -> None:
        self.rewards = rewards.double()
        _, self.index, self.count = torch.unique(group_ids, return_inverse=True, return_counts=True)
        self.mean = self._sum(self.rewards) / self.count
        low, high = (self._fold(self.rewards, how) for how in ("amin", "amax"))
        self.has_spread = low != high

    def std(self) -> Tensor:
        """Sample standard deviation [G]; exactly 0 where all rewards are equal."""
        squares = self._sum((self.rewards - self.mean[self.index]) ** 2)
        std = (squares / (self.count - 1).clamp(min=1)).sqrt()
        return std.masked_fill(~self.has_spread, 0.0)

    def _sum(self, values: Tensor) -> Tensor:
        return self._fold(values, "sum")

    def _fold(self, values: Tensor, how: str) -> Tensor:
        empty = values.new_empty(len(self.count))
        return empty.scatter_reduce(0, self.index, values, how, include_self=False)


def _valid(rewards: Tensor) -> Tensor:
    assert not rewards.isinf().any(), "a reward that is infinite must not get here"
    return ~rewards.isnan()


def _std(values: Tensor) -> float:
    return float(values.std()) if len(values) > 1 else 0.0
