"""Groups of equal rewards, and metrics of groups."""

from math import nan

import pytest

from megatron_grpo.config.grpo import GRPOConfig
from megatron_grpo.rollout.generation import Generation, ScoredGroup

SUM = 0.1 + 0.2  # 0.30000000000000004


@pytest.mark.parametrize(
    ("totals", "has_variance"),
    [
        ([nan, 0.5, 0.5], False),
        ([nan, nan], False),
        ([nan, 0.5, 0.4], True),
        *([([SUM * size, 0.3 * size], False) for size in (1.0, 1e6)]),
        *([([0.3 * size, 0.300001 * size], True) for size in (1.0, 1e6)]),
    ],
)
def test_has_reward_variance_but_for_rounding_and_failed_scores(totals, has_variance):
    assert ScoredGroup([], [], totals).has_reward_variance(None) == has_variance


def test_has_reward_variance_of_one_reward_disregards_a_length_penalty():
    def group(*scores: tuple[float, float]) -> ScoredGroup:
        rewards = [{"exact": right, "soft_overlong": penalty} for right, penalty in scores]
        return ScoredGroup([], rewards, [sum(score) for score in scores])

    all_wrong = group((0, 0), (0, -0.5))
    assert all_wrong.has_reward_variance(None)
    assert not all_wrong.has_reward_variance("exact")
    assert group((0, 0), (1, -1)).has_reward_variance("exact")
    # Only one will be trained on.
    assert not group((0, 0), (1, nan)).has_reward_variance("exact")


def config(**options) -> GRPOConfig:
    return GRPOConfig(num_generations=2, generation_batch_size=16, **options)


def test_add_replaces_groups_by_the_reward_that_the_config_names():
    cfg = config(dynamic_sample=True, dynamic_sample_reward="exact")
    generation = Generation(0)
    for right, is_replaced in ((0.0, True), (1.0, False)):
        group = ScoredGroup([], [{"exact": 0.0}, {"exact": right}], [0.1, 0.9])
        assert generation.add(group, cfg) == is_replaced
    assert not generation.add(ScoredGroup([], [], [0.1, 0.1]), config())


def test_metrics_unfiltered_cover_the_groups_of_replaced_prompts():
    cfg, generation = config(dynamic_sample=True), Generation(0)
    for _ in range(8):
        generation.add(ScoredGroup([], [], [0.0, nan]), cfg)
        generation.add(ScoredGroup([], [], [0.0, 1.0]), cfg)
    metrics = generation.metrics(8, cfg)
    assert metrics["unfiltered/reward"] == 1 / 3
    assert metrics["unfiltered/frac_reward_zero_std"] == 0.5
    assert metrics["rollout/num_resampled_prompts"] == 8
    assert (generation.num_failed, len(generation.totals)) == (8, 32)
