"""Importance weights of trainer over engine at their bounds and far beyond."""

import pytest
import torch

from megatron_grpo.algorithm.objectives import mismatch_weights, on_policy_mask
from megatron_grpo.config.grpo import GRPOConfig
from parallel.sequences import SequenceMeans


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(
    ("kind", "weights"),
    [("truncate", [2.0, 2.0, 0.5, 0.5]), ("mask", [0.0, 2.0, 0.5, 0.0])],
    ids=["truncate", "mask"],
)
def test_weights_at_a_bound_stay_and_beyond_it_are_cut_or_zero(level, kind, weights):
    cfg = GRPOConfig(
        generation_batch_size=8,
        rollout_importance_sampling_mode=f"{level}_{kind}",
        rollout_importance_sampling_threshold=2.0,
        rollout_importance_sampling_min=0.5,
    )
    bounds = torch.tensor([2.0, 0.5], dtype=torch.float64).log()
    beyond = torch.tensor([1e4], dtype=torch.float64)  # exp overflows
    mismatch = torch.cat([beyond, bounds, -beyond])
    one_each = SequenceMeans(torch.ones(4, dtype=torch.int64), None)
    assert mismatch_weights(mismatch, one_each, cfg).tolist() == weights


def test_a_rejected_sequence_has_no_weight_and_any_other_its_token_weights():
    cfg = GRPOConfig(
        generation_batch_size=8,
        rollout_importance_sampling_mode="token_truncate",
        rollout_importance_sampling_threshold=3.0,
        rollout_rs="geometric",
        rollout_rs_threshold=2.0,
    )
    assert cfg.rollout_rs_threshold_lower == 0.5
    # Geometric means lie just inside the bounds or just beyond them.
    ratios = torch.tensor([3.9, 1.0, 3.9, 1.1, 0.26, 1.0, 0.26, 0.9], dtype=torch.float64)
    sequences = SequenceMeans(torch.full((4,), 2), None)
    weights = mismatch_weights(ratios.log(), sequences, cfg)
    assert weights.tolist() == pytest.approx([3.0, 1.0, 0.0, 0.0, 0.26, 1.0, 0.0, 0.0])
    alone = cfg.model_copy(update={"rollout_importance_sampling_mode": None})
    assert mismatch_weights(ratios.log(), sequences, alone).tolist() == [1, 1, 0, 0, 1, 1, 0, 0]


def test_off_policy_sequences_lose_only_tokens_of_negative_advantage():
    sequence = SequenceMeans(torch.tensor([3]), None)
    kept = on_policy_mask(
        -torch.ones(3), torch.zeros(3), torch.tensor([-1.0, 0.0, 1.0]), sequence, threshold=0.5
    )
    assert kept.tolist() == [False, True, True]
