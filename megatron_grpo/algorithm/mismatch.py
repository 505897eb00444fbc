"""Corrections for tokens that another policy has made than the one that the loss believes.

An engine and the trainer compute other log-probabilities from the same weights: other kernels,
other precision, experts chosen otherwise. And a completion may be older than the policy.
"""

from torch import Tensor

from megatron_grpo.config.grpo_config import GRPOConfig
from parallel.sequences import SequenceMeans


def rollout_weights(
    log_mismatch: Tensor, sequences: SequenceMeans, cfg: GRPOConfig
) -> Tensor | None:
    """Importance weight [K] of each token, of the trainer's policy over the engine's; None: 1.

    With d = `log_mismatch` [K], the trainer's log-probability of the token less the engine's, and
    the bounds ``rollout_importance_sampling_min`` <= w <= ``.._threshold``:

    - w of a token is exp(d) (TIS, "Your efficient RL framework secretly brings you off-policy RL
      training", Yao et al. 2025); of a sequence, exp of the sum of d (MIS, Liu et al. 2025); or
      geometric, exp of its mean, which does not grow with the length;
    - truncate: w cut to the bounds; mask: 0 beyond them (IcePop, arXiv 2510.18855).
    """
    mode = cfg.rollout_importance_sampling_mode
    if mode is None:
        return None
    level, _, kind = mode.partition("_")
    if level == "sequence":
        log_mismatch = sequences.sum(log_mismatch)
    elif level == "geometric":
        log_mismatch = sequences.mean(log_mismatch)
    weights = log_mismatch.exp()
    low, high = cfg.rollout_importance_sampling_min, cfg.rollout_importance_sampling_threshold
    if kind == "truncate":
        return weights.clamp(low, high)
    return weights.where((weights >= low) & (weights <= high), 0.0)


def on_policy_mask(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    sequences: SequenceMeans,
    threshold: float,
) -> Tensor:
    """Which tokens [K] stay: all but those of negative advantage in sequences left behind.

    A sequence is left behind where the mean over its tokens of ``sampling_logprobs - logprobs`` is
    above `threshold`: DeepSeek-V3.2, arXiv 2512.02556, eq. 9. `sampling_logprobs` [K] are the
    engine's.
    """
    divergence = sequences.mean(sampling_logprobs - logprobs)
    return (advantages >= 0) | (divergence <= threshold)
