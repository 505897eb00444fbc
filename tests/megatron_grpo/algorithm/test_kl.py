"""The weight of the KL penalty follows the divergence that a step has found."""

import pytest

from megatron_grpo.algorithm.kl import adapted_beta


@pytest.mark.parametrize(
    ("kl", "change"),
    [(0.02, 0.2), (0.0105, 0.05), (0.01, 0.0), (0.0095, -0.05), (0.0, -0.2)],
    ids=["twice the target", "above it", "at it", "below it", "none"],
)
def test_beta_grows_above_the_target_and_shrinks_below_it_by_a_fifth_at_most(kl, change):
    # 8 completions are 0.08 of a horizon of 100.
    assert adapted_beta(0.1, kl, 0.01, 8, 100) == pytest.approx(0.1 * (1 + change * 0.08))


@pytest.mark.parametrize(("kl", "beta"), [(0.02, 0.12), (0.0, 0.08)])
def test_a_step_of_more_completions_than_the_horizon_changes_it_by_no_more(kl, beta):
    assert adapted_beta(0.1, kl, 0.01, 300, 100) == pytest.approx(beta)
