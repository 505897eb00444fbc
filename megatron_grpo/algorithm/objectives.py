"""What each loss type maximizes: the objective of every token, before weights add them up.

All are functions of a ratio r of the present policy over the one that generated, and of the
advantage A, both [K]; they return what is to be minimized.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_grpo.config.grpo_config import GRPOConfig, ImportanceLevel
from parallel.sequences import SequenceMeans

LOG_BOUND = 20.0
LOG_LEAST = -18.420680743952367  # of 1e-8
"""What VESPO keeps log-weights between, in the authors' code and TRL's."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Losses of tokens, and which of them a clip held back: [K] each."""

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def objective(
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    rollout_weights: Tensor | None,
    sequences: SequenceMeans,
    cfg: GRPOConfig,
) -> Objective:
    """The objective of ``cfg.loss_type``; `rollout_weights` [K], if any, are in it.

    `log_ratio` [K] is `logprobs` less the old ones; `sequences` says whose the tokens are.
    """
    if cfg.loss_type == "vespo":
        return vespo(logprobs, log_ratio, advantages, rollout_weights, sequences, cfg)
    if cfg.loss_type == "gmpo":
        found = gmpo(log_ratio, advantages, sequences, cfg)
    else:
        ratio = importance_ratio(logprobs, log_ratio, sequences, cfg.importance_sampling_level)
        if cfg.loss_type == "cispo":
            found = cispo(logprobs, ratio, advantages, cfg)
        elif cfg.loss_type == "sapo":
            found = sapo(ratio, advantages, cfg)
        else:
            found = clipped(ratio, advantages, cfg)
    if rollout_weights is None:
        return found
    return Objective(
        loss=found.loss * rollout_weights,
        clipped_low=found.clipped_low,
        clipped_high=found.clipped_high,
    )


def importance_ratio(
    logprobs: Tensor, log_ratio: Tensor, sequences: SequenceMeans, level: ImportanceLevel
) -> Tensor:
    """The ratio of each token [K]; at the level of the sequence the same for all of it.

    - token: exp(log_ratio), as in PPO;
    - sequence: exp of the mean of log_ratio over the sequence, GSPO (arXiv 2507.18071, eq. 7);
    - sequence_token: the same value, whose gradient is that of the token alone, GSPO-token
      (eq. 14): another one only where advantages differ within the sequence.
    """
    if level == "token":
        return log_ratio.exp()
    if level == "sequence":
        return sequences.mean(log_ratio).exp()
    return (sequences.mean(log_ratio.detach()) + logprobs - logprobs.detach()).exp()


def clipped(ratio: Tensor, advantages: Tensor, cfg: GRPOConfig) -> Objective:
    """PPO's clipped surrogate, of grpo, bnpo, dapo, dr_grpo and luspo.

    DeepSeekMath, arXiv 2402.03300, eq. 3:
    ``-min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A)``. `epsilon_high` above
    `epsilon` is DAPO's clip-higher (arXiv 2503.14476, eq. 10). `delta` is the dual clip as TRL
    defines it, from INTELLECT-2 (arXiv 2505.07291): it bounds the ratio where the advantage is
    negative, which the plain clip leaves unbounded, and wants to be above 1 + epsilon_high.
    """
    least, most = 1 - cfg.epsilon, 1 + cfg.epsilon_high
    bound = math.inf if cfg.delta is None else cfg.delta  # above `most`: the config sees to it
    # For A < 0 the minimum is A clamp(r, least, delta), else A min(r, most).
    negative = advantages < 0
    # `where` of two Python numbers would be float32, whatever the ratio is.
    low = torch.where(negative, ratio.new_full((), least), ratio.new_full((), -math.inf))
    high = torch.where(negative, ratio.new_full((), bound), ratio.new_full((), most))
    return Objective(
        loss=-advantages * ratio.clamp(low, high),
        clipped_low=ratio < low,
        clipped_high=(ratio > most) & (advantages > 0),
    )


def cispo(logprobs: Tensor, ratio: Tensor, advantages: Tensor, cfg: GRPOConfig) -> Objective:
    """REINFORCE with a cut weight, by which no token loses its gradient.

    MiniMax-M1, arXiv 2506.13585, with the upper bound alone as in ScaleRL (arXiv
    2510.13786):
    ``-min(r, epsilon_high).detach() A logprob``
    """
    weight = ratio.detach().clamp(max=cfg.epsilon_high)
    return Objective(
        loss=-weight * advantages * logprobs,
        clipped_low=torch.zeros_like(advantages, dtype=torch.bool),
        clipped_high=(ratio > cfg.epsilon_high) & (advantages > 0),
    )


def sapo(ratio: Tensor, advantages: Tensor, cfg: GRPOConfig) -> Objective:
    """A soft gate in the place of the clip: SAPO, arXiv 2511.20347.

    ``-4 / tau sigmoid(tau (r - 1)) A``, with tau by the sign of A.
    """
    tau = torch.full_like(advantages, cfg.sapo_temperature_neg)
    tau = tau.masked_fill(advantages > 0, cfg.sapo_temperature_pos)
    never = torch.zeros_like(advantages, dtype=torch.bool)
    loss = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages
    return Objective(loss=loss, clipped_low=never, clipped_high=never)


def gmpo(
    log_ratio: Tensor, advantages: Tensor, sequences: SequenceMeans, cfg: GRPOConfig
) -> Objective:
    """The geometric mean of clipped token ratios: GMPO, arXiv 2507.20673.

    ``-A exp(mean over the sequence of s min(s log r, s clip(log r, -epsilon, epsilon_high)))``
    with s the sign of A: the clips are of log r, and 0.4 each in the paper.
    """
    sign = torch.where(advantages >= 0, 1.0, -1.0).to(log_ratio)
    cut = log_ratio.clamp(-cfg.epsilon, cfg.epsilon_high)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * cut)
    return Objective(
        loss=-advantages * sequences.mean(pessimistic).exp(),
        clipped_low=(log_ratio < -cfg.epsilon) & (advantages < 0),
        clipped_high=(log_ratio > cfg.epsilon_high) & (advantages > 0),
    )


def vespo(
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    rollout_weights: Tensor | None,
    sequences: SequenceMeans,
    cfg: GRPOConfig,
) -> Objective:
    """REINFORCE with a soft weight of the whole sequence: VESPO, arXiv 2602.10693.

    ``-phi(w).detach() A logprob`` with ``phi(w) = exp(lambda) w**k exp(-lambda w)``, which is 1 at
    w = 1, w the product over the sequence of ratios and of `rollout_weights`, and lambda and k by
    the sign of A. Logarithms are kept within bounds, as in TRL.
    """
    log_weight = sequences.sum(log_ratio.detach().clamp(-LOG_BOUND, LOG_BOUND))
    if rollout_weights is not None:
        log_weight = log_weight + sequences.sum(rollout_weights.log().clamp(LOG_LEAST, LOG_BOUND))
    log_weight = log_weight.clamp(LOG_LEAST, LOG_BOUND)
    positive = advantages >= 0
    k = torch.full_like(log_weight, cfg.vespo_k_neg).masked_fill(positive, cfg.vespo_k_pos)
    tilt = torch.full_like(log_weight, cfg.vespo_lambda_neg)
    tilt = tilt.masked_fill(positive, cfg.vespo_lambda_pos)
    phi = (tilt + k * log_weight - tilt * log_weight.exp()).exp()
    never = torch.zeros_like(positive)
    return Objective(loss=-phi * advantages * logprobs, clipped_low=never, clipped_high=never)
