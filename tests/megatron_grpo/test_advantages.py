import pytest
import torch

from megatron_grpo.advantages import group_advantages
from oracle import oracle_advantages

REWARDS = torch.tensor([0.9, 0.3, -0.1, 0.7])
ONE_GROUP = torch.zeros(4, dtype=torch.int64)


def test_the_worked_example_with_the_population_standard_deviation():
    advantages = group_advantages(REWARDS, ONE_GROUP, correction=0, epsilon=0.0)
    assert [f"{a:+.3f}" for a in advantages.tolist()] == ["+1.172", "-0.391", "-1.432", "+0.651"]
    assert f"{REWARDS.mean():.2f}" == "0.45"
    spread = (REWARDS[0] - REWARDS.mean()) / advantages[0]
    assert f"{spread:.3f}" == "0.384"


def test_by_default_the_sample_standard_deviation_and_its_epsilon_divide():
    expected = oracle_advantages([REWARDS.double().tolist()], correction=1, epsilon=1e-4)
    torch.testing.assert_close(
        group_advantages(REWARDS, ONE_GROUP), torch.tensor(expected, dtype=torch.float64)
    )


def test_each_completion_is_judged_within_its_group_whatever_the_order():
    groups = [[0.0, 1.0, 1.0], [5.0, 7.0, 6.0]]
    expected = oracle_advantages(groups, correction=1, epsilon=1e-4)
    order = [4, 0, 3, 1, 5, 2]
    advantages = group_advantages(
        torch.tensor(groups, dtype=torch.float64).flatten()[order],
        torch.tensor([9, 9, 9, 2, 2, 2])[order],
    )
    assert advantages.tolist() == pytest.approx([expected[i] for i in order], abs=1e-15)


def test_batch_scaling_divides_by_the_spread_of_all_rewards():
    rewards = torch.tensor([0.0, 1.0, 10.0, 30.0], dtype=torch.float64)
    advantages = group_advantages(rewards, torch.tensor([0, 0, 1, 1]), "batch")
    scale = rewards.std().item() + 1e-4
    assert advantages.tolist() == pytest.approx(
        [-0.5 / scale, 0.5 / scale, -10 / scale, 10 / scale]
    )


def test_no_scaling_leaves_the_difference_to_the_mean():
    rewards = torch.tensor([0.0, 1.0, 10.0, 30.0])
    assert group_advantages(rewards, torch.tensor([0, 0, 1, 1]), "none").tolist() == [
        -0.5,
        0.5,
        -10,
        10,
    ]


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e8 + 0.1])
def test_a_group_with_equal_rewards_has_advantage_exactly_zero(scale_rewards, reward):
    # Seven times 0.1 has a mean that is not 0.1: spread cannot be judged by what is left over.
    rewards = torch.tensor([reward] * 7 + [0.0, 1.0], dtype=torch.float64)
    advantages = group_advantages(rewards, torch.tensor([0] * 7 + [1] * 2), scale_rewards)
    assert advantages[:7].tolist() == [0.0] * 7
    assert advantages[7] < 0 < advantages[8]


def test_a_tiny_true_difference_still_counts():
    advantages = group_advantages(
        torch.tensor([0.5, 0.5 + 1e-6], dtype=torch.float64), torch.tensor([0, 0]), epsilon=0.0
    )
    assert advantages.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_a_single_completion_has_advantage_zero(scale_rewards):
    assert group_advantages(torch.tensor([3.0]), torch.tensor([0]), scale_rewards).tolist() == [0.0]


def test_a_reward_that_is_not_finite_is_a_bug():
    with pytest.raises(AssertionError, match="not finite"):
        group_advantages(torch.tensor([1.0, float("nan")]), torch.tensor([0, 0]))
