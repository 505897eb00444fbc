"""Groups whose rewards are all equal, and what is counted of groups."""

import math

import pytest

from megatron_grpo.config.grpo import GRPOConfig
from megatron_grpo.rollout.generation import Generation, ScoredGroup


def test_samples_that_could_not_be_scored_are_no_spread():
    nan = math.nan
    assert not ScoredGroup([], [], [nan, 0.5, 0.5]).has_reward_variance(None)
    assert not ScoredGroup([], [], [nan, nan]).has_reward_variance(None)
    assert ScoredGroup([], [], [nan, 0.5, 0.4]).has_reward_variance(None)


@pytest.mark.parametrize("size", [1.0, 1e6])
def test_sums_that_were_rounded_differently_are_no_spread(size):
    rounded = [(0.1 + 0.2) * size, 0.3 * size]
    assert rounded[0] != rounded[1]
    assert not ScoredGroup([], [], rounded).has_reward_variance(None)
    assert ScoredGroup([], [], [0.3 * size, 0.300001 * size]).has_reward_variance(None)


def test_a_length_penalty_is_no_spread_when_accuracy_is_compared():
    def group(*scores: tuple[float, float]) -> ScoredGroup:
        rewards = [{"exact": right, "soft_overlong": penalty} for right, penalty in scores]
        return ScoredGroup([], rewards, [sum(score) for score in scores])

    all_wrong = group((0, 0), (0, -0.5))
    assert all_wrong.has_reward_variance(None)
    assert not all_wrong.has_reward_variance("exact")
    assert group((0, 0), (1, -1)).has_reward_variance("exact")
    assert not group((0, 0), (1, math.nan)).has_reward_variance(
        "exact"
    )  # only one will be trained on


def config(**options) -> GRPOConfig:
    return GRPOConfig(num_generations=2, generation_batch_size=16, dynamic_sample=True, **options)


def test_groups_are_replaced_by_the_reward_that_the_config_names():
    cfg, generation = config(dynamic_sample_reward="exact"), Generation(0)
    for right, is_replaced in ((0.0, True), (1.0, False)):
        group = ScoredGroup([], [{"exact": 0.0}, {"exact": right}], [0.1, 0.9])
        assert generation.add(group, cfg) == is_replaced
    without = GRPOConfig(num_generations=2, generation_batch_size=16)
    assert not generation.add(ScoredGroup([], [], [0.1, 0.1]), without)


def test_unfiltered_metrics_cover_the_groups_of_replaced_prompts():
    cfg, generation = config(), Generation(0)
    for _ in range(8):
        generation.add(ScoredGroup([], [], [0.0, math.nan]), cfg)
        generation.add(ScoredGroup([], [], [0.0, 1.0]), cfg)
    metrics = generation.metrics(8, cfg)
    assert metrics["unfiltered/reward"] == 1 / 3
    assert metrics["unfiltered/frac_reward_zero_std"] == 0.5
    assert metrics["rollout/num_resampled_prompts"] == 8
    assert (generation.num_failed, len(generation.totals)) == (8, 32)
