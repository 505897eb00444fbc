"""Corrections for tokens that were sampled from another policy than the loss assumes.

Engine and trainer compute different log-probabilities from the same weights: kernels, precision
and the choice of experts differ. A completion may also be older than the policy.
"""

import torch
from torch import Tensor

from megatron_grpo.config.grpo import GRPOConfig
from parallel.sequences import SequenceMeans


def rollout_weights(
    log_mismatch: Tensor, sequences: SequenceMeans, cfg: GRPOConfig
) -> Tensor | None:
    """Importance weight [K] of the trainer's policy over the engine's; None if nothing corrects it.

    With d = `log_mismatch` [K], the trainer's log-probability of the token minus the engine's, and
    the bounds ``rollout_importance_sampling_min`` <= w <= ``.._threshold``:

    - token: w = exp(d) (TIS, "Your efficient RL framework secretly brings you off-policy RL
      training", Yao et al. 2025); sequence: exp of the sum of d over the sequence (MIS, Liu et al.
      2025); geometric: exp of the mean of d, which does not grow with the length;
    - truncate: w is clamped to the bounds; mask: w is 0 outside them (IcePop, arXiv 2510.18855).

    With `rollout_rs`, the weight is also 0 where the ratio of that level is outside bounds of its
    own: rejection sampling, as in verl (Liu et al. 2025). Without a mode, all other weights are 1.
    """
    mode = cfg.rollout_importance_sampling_mode
    weights: Tensor | None = None
    if mode is not None:
        level, _, kind = mode.partition("_")
        weights = _ratio(log_mismatch, sequences, level)
        low, high = cfg.rollout_importance_sampling_min, cfg.rollout_importance_sampling_threshold
        if kind == "truncate":
            weights = weights.clamp(low, high)
        else:
            weights = weights.where((weights >= low) & (weights <= high), 0.0)
    if cfg.rollout_rs is None:
        return weights
    ratio = _ratio(log_mismatch, sequences, cfg.rollout_rs)
    is_kept = (ratio >= cfg.rollout_rs_threshold_lower) & (ratio <= cfg.rollout_rs_threshold)
    weights = torch.ones_like(ratio) if weights is None else weights
    return weights.where(is_kept, 0.0)


def _ratio(log_mismatch: Tensor, sequences: SequenceMeans, level: str) -> Tensor:
    """The ratio of trainer over engine [K] of each token, of its sequence, or geometric mean."""
    if level == "sequence":
        log_mismatch = sequences.sum(log_mismatch)
    elif level == "geometric":
        log_mismatch = sequences.mean(log_mismatch)
    return log_mismatch.exp()


def on_policy_mask(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    sequences: SequenceMeans,
    threshold: float,
) -> Tensor:
    """Mask [K] without the tokens of negative advantage in off-policy sequences.

    A sequence is off-policy if the mean of ``sampling_logprobs - logprobs`` over its tokens exceeds
    `threshold`: DeepSeek-V3.2, arXiv 2512.02556, eq. 9. `sampling_logprobs` [K] are the engine's.
    """
    divergence = sequences.mean(sampling_logprobs - logprobs)
    return (advantages >= 0) | (divergence <= threshold)
