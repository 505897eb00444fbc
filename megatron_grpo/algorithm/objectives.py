"""Per-token objective of each loss type, before the weighted sum over tokens.

Objectives are functions of the ratio r of current over generating policy, and of the advantage A,
both [K]; functions return the negated objective, to be minimised. The end of the file corrects
tokens from another policy than the loss assumes: engine and trainer compute different
log-probabilities from equal weights, as kernels, precision and the choice of experts differ, and a
completion may be older than the policy.
"""

import math

import torch
from torch import Tensor

from megatron_grpo.config.grpo import GRPOConfig, ImportanceLevel
from parallel.sequences import SequenceMeans

LOG_MOST = 80.0
"""Bound for log-ratios: exp(89) is infinite in float32, and its gradient is NaN if clipped."""
LOG_BOUND = 20.0
LOG_LEAST = -18.420680743952367  # of 1e-8
"""Bounds of VESPO's log-weights, as in the authors' code and in TRL."""

CLIPPED = frozenset({"clipped_low", "clipped_high"})
TokenLosses = tuple[Tensor, dict[str, Tensor]]
"""Losses [K], with gradient, and other values [K] by name, whose means become metrics.
`CLIPPED` are masks of tokens whose gradient the lower or upper clip removed or bounded."""


def importance_ratio(
    logprobs: Tensor, log_ratio: Tensor, sequences: SequenceMeans, level: ImportanceLevel
) -> Tensor:
    """Ratio [K] of current over generating policy.

    - token: exp(log_ratio), as in PPO;
    - sequence: exp of the mean of log_ratio over the sequence, one value for all of its tokens:
      GSPO (arXiv 2507.18071, eq. 7);
    - sequence_token: the value of "sequence", differentiated only through the token's own
      log-probability: GSPO-token (eq. 14). Its gradient differs from "sequence" only where
      advantages differ within a sequence.
    """
    if level == "token":
        log = log_ratio
    elif level == "sequence":
        log = sequences.mean(log_ratio)
    else:
        log = sequences.mean(log_ratio.detach()) + logprobs - logprobs.detach()
    return log.clamp(max=LOG_MOST).exp()


def clipped(
    ratio: Tensor, advantages: Tensor, *, epsilon: float, epsilon_high: float, delta: float | None
) -> TokenLosses:
    """PPO's clipped surrogate, used by grpo, bnpo, dapo, dr_grpo and luspo.

    DeepSeekMath, arXiv 2402.03300, eq. 3:
    ``-min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A)``. `epsilon_high` above
    `epsilon` is DAPO's clip-higher (arXiv 2503.14476, eq. 10). `delta` is the dual clip as TRL
    defines it, from INTELLECT-2 (arXiv 2505.07291): it bounds the ratio where the advantage is
    negative, which the plain clip leaves unbounded, and must be above 1 + epsilon_high.
    """
    least, most = 1 - epsilon, 1 + epsilon_high
    bound = math.inf if delta is None else delta  # above `most`: the config checks this
    # For A < 0 the minimum is A clamp(r, least, delta), else A min(r, most).
    negative = advantages < 0
    # `where` of two Python numbers would be float32, whatever the dtype of the ratio.
    low = torch.where(negative, ratio.new_full((), least), ratio.new_full((), -math.inf))
    high = torch.where(negative, ratio.new_full((), bound), ratio.new_full((), most))
    masks = {"clipped_low": ratio < low, "clipped_high": (ratio > most) & (advantages > 0)}
    return -advantages * ratio.clamp(low, high), masks


def cispo(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, epsilon_high: float
) -> TokenLosses:
    """REINFORCE with a clipped importance weight, so that no token loses its gradient.

    MiniMax-M1, arXiv 2506.13585, with only the upper bound, as in ScaleRL (arXiv 2510.13786):
    ``-min(r, epsilon_high).detach() A logprob``
    """
    weight = ratio.detach().clamp(max=epsilon_high)
    masks = {
        "clipped_low": torch.zeros_like(advantages, dtype=torch.bool),
        "clipped_high": (ratio > epsilon_high) & (advantages > 0),
    }
    return -weight * advantages * logprobs, masks


def sapo(
    ratio: Tensor, advantages: Tensor, *, sapo_temperature_pos: float, sapo_temperature_neg: float
) -> TokenLosses:
    """A soft gate instead of the clip: SAPO, arXiv 2511.20347.

    ``-4 / tau sigmoid(tau (r - 1)) A``, where tau depends on the sign of A.
    """
    tau = torch.full_like(advantages, sapo_temperature_neg)
    tau = tau.masked_fill(advantages > 0, sapo_temperature_pos)
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages, {}


def gmpo(
    log_ratio: Tensor,
    advantages: Tensor,
    sequences: SequenceMeans,
    *,
    epsilon: float,
    epsilon_high: float,
) -> TokenLosses:
    """Geometric mean of clipped token ratios: GMPO, arXiv 2507.20673.

    ``-A exp(mean over the sequence of s min(s log r, s clip(log r, -epsilon, epsilon_high)))``
    with s the sign of A. Clips apply to log r; the paper uses 0.4 for both.
    """
    # Not `advantages.sign()`, whose 0 for A = 0 would count the token with ratio 1 in the mean.
    sign = torch.where(advantages >= 0, 1.0, -1.0).to(log_ratio)
    cut = log_ratio.clamp(-epsilon, epsilon_high)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * cut)
    masks = {
        "clipped_low": (log_ratio < -epsilon) & (advantages < 0),
        "clipped_high": (log_ratio > epsilon_high) & (advantages > 0),
    }
    return -advantages * sequences.mean(pessimistic).exp(), masks


def vespo(
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    rollout_weights: Tensor | None,
    sequences: SequenceMeans,
    *,
    vespo_k_pos: float,
    vespo_lambda_pos: float,
    vespo_k_neg: float,
    vespo_lambda_neg: float,
) -> TokenLosses:
    """REINFORCE with a soft weight of the whole sequence: VESPO, arXiv 2602.10693.

    ``-phi(w).detach() A logprob`` with ``phi(w) = exp(lambda) w**k exp(-lambda w)``; phi(1) = 1.
    w is the product of ratios and `rollout_weights` over the sequence; lambda and k depend on the
    sign of A. Logarithms are clamped, as in TRL.
    """
    log_weight = sequences.sum(log_ratio.detach().clamp(-LOG_BOUND, LOG_BOUND))
    if rollout_weights is not None:
        log_weight = log_weight + sequences.sum(rollout_weights.log().clamp(LOG_LEAST, LOG_BOUND))
    log_weight = log_weight.clamp(LOG_LEAST, LOG_BOUND)
    positive = advantages >= 0
    k = torch.full_like(log_weight, vespo_k_neg).masked_fill(positive, vespo_k_pos)
    tilt = torch.full_like(log_weight, vespo_lambda_neg).masked_fill(positive, vespo_lambda_pos)
    phi = (tilt + k * log_weight - tilt * log_weight.exp()).exp()
    return -phi * advantages * logprobs, {}


def sft(logprobs: Tensor) -> TokenLosses:
    """Cross-entropy of the tokens, whoever wrote them: supervised fine-tuning (SFT)."""
    return -logprobs, {}


def mismatch_weights(
    log_mismatch: Tensor, sequences: SequenceMeans, cfg: GRPOConfig
) -> Tensor | None:
    """Importance weight w [K] of the trainer's policy over the engine's; None without a correction.

    With d = `log_mismatch` [K], the trainer's log-probability minus the engine's, and the bounds
    ``rollout_importance_sampling_min`` <= w <= ``.._threshold``:

    - token: w = exp(d) (TIS, "Your efficient RL framework secretly brings you off-policy RL
      training", Yao et al. 2025); sequence: exp of the sum of d over the sequence (MIS, Liu et al.
      2025); geometric: exp of the mean of d, which does not grow with the length;
    - truncate: w is clamped to the bounds; mask: w is 0 outside them (IcePop, arXiv 2510.18855).

    With `rollout_rs`, the weight is also 0 where the ratio of its level is outside the bounds
    ``rollout_rs_threshold_lower`` and ``rollout_rs_threshold``: rejection sampling, as in verl (Liu
    et al. 2025). With `rollout_rs` alone, other weights are 1.
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
    """Ratio [K] of trainer over engine: per token, per sequence, or the geometric mean."""
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
    """Mask [K] of tokens to keep, False at negative advantages in off-policy sequences.

    A sequence is off-policy if the mean of ``sampling_logprobs - logprobs`` over its tokens exceeds
    `threshold`: DeepSeek-V3.2, arXiv 2512.02556, eq. 9. `sampling_logprobs` [K] are the engine's.
    """
    divergence = sequences.mean(sampling_logprobs - logprobs)
    return (advantages >= 0) | (divergence <= threshold)
