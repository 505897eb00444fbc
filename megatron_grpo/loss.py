"""The GRPO loss of one microbatch, and the weights with which microbatches add up."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossType = Literal["grpo", "dapo", "dr_grpo"]


def loss_weights(lengths: Tensor, loss_type: LossType, max_completion_length: int) -> Tensor:
    """Weight of each response token, for each of the N sequences of the whole optimizer batch.

    With L_i response tokens in sequence i:

    - "grpo": 1 / (N L_i), the mean over sequences of each one's mean (arXiv 2402.03300, eq. 3);
    - "dapo": 1 / sum L, the mean over all tokens (arXiv 2503.14476, section 3.3);
    - "dr_grpo": 1 / (N max_completion_length), a constant, which removes the preference of the
      first for short right and long wrong answers (arXiv 2503.20783).

    The weights are global: the loss is a plain sum of weighted tokens over microbatches, context
    and data ranks, and nothing is divided later.

    Args:
        lengths: [N] response tokens that count; 0 for a sequence that is masked whole.
        loss_type: one of the three above.
        max_completion_length: longest completion the sampler may produce.

    Returns:
        [N] float64. Finite always: where nothing counts, the weight multiplies nothing.
    """
    tokens, num_sequences = lengths.double(), len(lengths)
    denominators = {
        "grpo": num_sequences * tokens,
        "dapo": tokens.sum().expand_as(tokens),
        "dr_grpo": torch.full_like(tokens, num_sequences * max_completion_length),
    }
    return 1 / denominators[loss_type].clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class GRPOLoss:
    """A loss to differentiate, and what its tokens were like: [T], detached, zero off the mask."""

    total: Tensor  # scalar: this microbatch's part of the loss of the whole batch
    per_token: Tensor  # weighted; sums to `total`
    log_ratio: Tensor  # log of new policy over old
    clipped_low: Tensor  # bool: the clip at 1 - epsilon took the gradient away
    clipped_high: Tensor  # bool: the clip at 1 + epsilon_high did
    kl: Tensor  # k3 estimate of KL(policy || reference); zeros without a reference


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    mask: Tensor,
    *,
    epsilon: float,
    epsilon_high: float,
    delta: float | None,
    beta: float,
) -> GRPOLoss:
    """Clipped surrogate with a KL penalty (DeepSeekMath, arXiv 2402.03300, eq. 3).

    For a token with ratio r = exp(logprob - old_logprob) and advantage A::

        loss = weight * (-min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + beta k3)
        k3   = exp(ref - logprob) - (ref - logprob) - 1

    `epsilon_high` above `epsilon` is DAPO's clip-higher (arXiv 2503.14476). `delta` is the dual
    clip as TRL defines it, from INTELLECT-2 (arXiv 2505.07291): it bounds the ratio where the
    advantage is negative, which the plain clip leaves unbounded, and wants to be above
    1 + epsilon_high. k3 is Schulman's estimator, "Approximating KL divergence" (2020).

    Args:
        logprobs: [T], of the policy that is trained, in the index space of the packed tokens.
        old_logprobs: [T], of the policy that generated; None when that is the present one: r is
            then exactly 1, and the gradient that of the policy gradient.
        ref_logprobs: [T], of the reference; None exactly when `beta` is 0.
        advantages: [T].
        weights: [T], from `loss_weights`.
        mask: [T] bool, the response tokens whose logprobs this rank computed. What other places
            hold has no influence.
        epsilon: clip of the ratio below.
        epsilon_high: clip of the ratio above.
        delta: bound of the ratio for negative advantages; None for none.
        beta: weight of the KL penalty.
    """
    assert (ref_logprobs is None) == (beta == 0.0), (
        "a reference is for the KL penalty, and only that"
    )
    logprobs = logprobs.where(mask, 0.0)
    old = logprobs.detach() if old_logprobs is None else old_logprobs.where(mask, 0.0)
    log_ratio = logprobs - old
    ratio = log_ratio.exp()
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    per_token = -torch.minimum(bounded * advantages, clipped * advantages)

    kl = torch.zeros_like(logprobs)
    if ref_logprobs is not None:
        kl = k3(logprobs, ref_logprobs.where(mask, 0.0))
        per_token = per_token + beta * kl

    per_token = (weights * per_token).where(mask, 0.0)
    return GRPOLoss(
        total=per_token.sum(),
        per_token=per_token.detach(),
        log_ratio=log_ratio.detach(),
        clipped_low=mask & (ratio < 1 - epsilon) & (advantages < 0),
        clipped_high=mask & (ratio > 1 + epsilon_high) & (advantages > 0),
        kl=kl.detach(),
    )


def k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Per-token estimate of KL(p || q) from tokens drawn from p: unbiased and never negative.

    `logprobs` and `other_logprobs` are log p and log q of the drawn tokens.
    """
    difference = other_logprobs - logprobs
    return torch.expm1(difference) - difference
