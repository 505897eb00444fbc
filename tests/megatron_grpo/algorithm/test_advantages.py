import math

import pytest
import torch

from helpers.oracle.grpo import oracle_advantages, oracle_gdpo_advantages, oracle_process_advantages
from megatron_grpo.algorithm.advantages import (
    group_advantages,
    normalized_sum_advantages,
    process_advantages,
)

NAN = math.nan
ESTIMATORS = [
    ("grpo", "group"),
    ("grpo", "batch"),
    ("grpo", "none"),
    ("rloo", "group"),
    ("rloo", "batch"),
    ("rloo", "none"),
    ("reinforce_plus_plus", "batch"),
    ("reinforce_plus_plus_baseline", "batch"),
]

REWARDS = torch.tensor([0.9, 0.3, -0.1, 0.7])
ONE_GROUP = torch.zeros(4, dtype=torch.int64)


def test_the_worked_example_with_the_population_standard_deviation():
    advantages = group_advantages(REWARDS, ONE_GROUP, epsilon=0.0) * (4 / 3) ** 0.5
    assert [f"{a:+.3f}" for a in advantages.tolist()] == ["+1.172", "-0.391", "-1.432", "+0.651"]
    spread = (REWARDS[0] - REWARDS.mean()) / advantages[0]
    assert f"{spread:.3f}" == "0.384"


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e8 + 0.1])
def test_a_group_with_equal_rewards_has_advantage_exactly_zero(scale_rewards, reward):
    # The float mean of seven times 0.1 is not 0.1: the residue must not count as spread.
    rewards = torch.tensor([reward] * 7 + [0.0, 1.0], dtype=torch.float64)
    advantages = group_advantages(rewards, torch.tensor([0] * 7 + [1] * 2), scale_rewards)
    assert advantages[:7].tolist() == [0.0] * 7
    assert advantages[7] < 0 < advantages[8]


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize("size", [1.0, 1e6])
def test_sums_that_were_rounded_differently_are_equal_rewards(scale_rewards, size):
    rewards = torch.tensor([(0.1 + 0.2) * size, 0.3 * size, 0.0, size], dtype=torch.float64)
    assert rewards[0] != rewards[1]
    advantages = group_advantages(rewards, torch.tensor([0, 0, 1, 1]), scale_rewards)
    assert advantages[:2].tolist() == [0.0, 0.0]


def test_a_tiny_true_difference_still_counts():
    advantages = group_advantages(
        torch.tensor([0.5, 0.5 + 1e-6], dtype=torch.float64), torch.tensor([0, 0]), epsilon=0.0
    )
    assert advantages.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


@pytest.mark.parametrize("estimator, scale", ESTIMATORS)
@pytest.mark.parametrize(
    "groups",
    [
        [[0.9, 0.3, -0.1, 0.7]],
        [[0.0, 1.0, 1.0], [5.0, 7.0, 6.0]],
        [[1.0], [0.2, 0.9], [0.5, 0.5, 0.5], [0.1, 0.7, 0.4, 0.3, -2.0]],  # groups of any size
        [[NAN, 1.0, 0.0], [2.0, NAN, NAN], [NAN, NAN], [0.3, 0.6, 0.7]],
    ],
    ids=["one group", "two groups", "unequal groups", "failed rewards"],
)
def test_every_estimator_equals_the_oracle(estimator, scale, groups):
    ids = torch.tensor([g for g, group in enumerate(groups) for _ in group])
    rewards = torch.tensor([r for group in groups for r in group], dtype=torch.float64)
    # Resampling splits groups.
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    advantages = group_advantages(rewards[order], ids[order], scale, estimator=estimator)
    expected = oracle_advantages(groups, estimator=estimator, scale=scale)
    assert advantages.tolist() == pytest.approx([expected[i] for i in order], rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("estimator, scale", ESTIMATORS)
@pytest.mark.parametrize("size", [7, 8])
def test_a_batch_of_equal_rewards_has_advantage_exactly_zero(estimator, scale, size):
    ids = torch.arange(2 * size) // size
    rewards = torch.tensor([0.1] * (2 * size), dtype=torch.float64)
    assert group_advantages(rewards, ids, scale, estimator=estimator).tolist() == [0.0] * 2 * size
    assert normalized_sum_advantages(
        torch.stack([rewards, 3 * rewards], dim=1), torch.tensor([0.3, 0.7]), ids
    ).tolist() == [0.0] * (2 * size)


def test_rewards_that_cancel_but_for_rounding_have_advantage_exactly_zero():
    weights = torch.tensor([0.1, 0.2, -0.3], dtype=torch.float64)
    assert weights.sum() != 0
    scores = torch.stack([REWARDS] * 3, dim=1)
    assert normalized_sum_advantages(scores, weights, ONE_GROUP).tolist() == [0.0] * 4


@pytest.mark.parametrize("estimator, scale", ESTIMATORS)
def test_one_completion_for_each_prompt_is_compared_with_the_batch_or_with_nothing(
    estimator, scale
):
    rewards = torch.tensor([1.0, 3.0, 8.0], dtype=torch.float64)
    advantages = group_advantages(rewards, torch.arange(3), scale, estimator=estimator).tolist()
    if estimator == "reinforce_plus_plus":
        assert advantages == pytest.approx([(r - 4) / (13**0.5 + 1e-4) for r in (1, 3, 8)])
    else:
        assert advantages == [0.0, 0.0, 0.0]


SCORES = [[[1.0, 10.0], [0.0, 30.0], [1.0, 20.0]], [[0.0, 5.0], [0.0, 7.0]]]


def test_separately_normalized_rewards_equal_the_oracle():
    scores = torch.tensor([row for group in SCORES for row in group], dtype=torch.float64)
    advantages = normalized_sum_advantages(
        scores, torch.tensor([1.0, 0.5]), torch.tensor([0, 0, 0, 1, 1])
    )
    expected = oracle_gdpo_advantages(SCORES, [1.0, 0.5])
    assert advantages.tolist() == pytest.approx(expected, rel=1e-12)


def test_a_completion_with_a_failed_score_is_left_out():
    scores = torch.tensor([row for group in SCORES for row in group], dtype=torch.float64)
    weights, ids = torch.tensor([1.0, 0.5]), torch.tensor([0, 0, 0, 1, 1])
    failed = torch.cat([scores[:2], torch.tensor([[NAN, 4.0]]), scores[2:]])
    advantages = normalized_sum_advantages(failed, weights, torch.tensor([0, 0, 0, 0, 1, 1]))
    without = normalized_sum_advantages(scores, weights, ids).tolist()
    assert advantages.tolist() == [*without[:2], 0.0, *without[2:]]


def test_process_supervision_equals_the_oracle():
    steps = [[(0, 1.0), (4, 0.2)], [], [(2, -0.5), (2, 0.25)], [(1, 3.0)], [(0, 1.0), (1, 0.0)]]
    steps += [[], []]  # a group without a step
    lengths = [5, 3, 4, 2, 2, 3, 0]
    ids = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    found = process_advantages(steps, lengths, ids)
    expected = oracle_process_advantages(
        [steps[:3], steps[3:5], steps[5:]], [lengths[:3], lengths[3:5], lengths[5:]]
    )
    for tensor, values in zip(found, expected, strict=True):
        assert tensor.tolist() == pytest.approx(values, rel=1e-12, abs=1e-15)
