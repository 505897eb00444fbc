"""The GRPO loss of one microbatch, and the weights with which microbatches add up."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_grpo.grpo_config import GRPOConfig, LossType
from megatron_grpo.kl import kl_estimate
from megatron_grpo.mismatch import on_policy_mask, rollout_weights
from megatron_grpo.objectives import importance_ratio, objective
from parallel.packing import PackedBatch
from parallel.sequences import SequenceMeans


def loss_weights(lengths: Tensor, loss_type: LossType, max_completion_length: int) -> Tensor:
    """Weight of each response token, for each of the N sequences of the whole optimizer batch.

    With L_i response tokens in sequence i:

    - "grpo", "sapo", "gmpo": 1 / (N L_i), the mean over sequences of each one's mean (arXiv
      2402.03300, eq. 3);
    - "dapo", "bnpo", "cispo", "vespo": 1 / sum L, the mean over all tokens (arXiv 2503.14476, eq.
      8). bnpo is elsewhere the mean over the tokens of one device: here that would be a loss that
      depends on the layout, so it is dapo;
    - "dr_grpo": 1 / (N max_completion_length), a constant, which removes the preference of the
      first for short right and long wrong answers (arXiv 2503.20783);
    - "luspo": 1 / N, the sum over tokens (arXiv 2602.05261).

    The weights are global: the loss is a plain sum of weighted tokens over microbatches, context
    and data ranks, and nothing is divided later.

    Args:
        lengths: [N] response tokens that count; 0 for a sequence that is masked whole.
        loss_type: one of those above.
        max_completion_length: longest completion the sampler may produce.

    Returns:
        [N] float64. Finite always: where nothing counts, the weight multiplies nothing.
    """
    tokens, num_sequences = lengths.double(), len(lengths)
    if loss_type in ("grpo", "sapo", "gmpo"):
        denominators = num_sequences * tokens
    elif loss_type == "dr_grpo":
        denominators = torch.full_like(tokens, num_sequences * max_completion_length)
    elif loss_type == "luspo":
        denominators = torch.full_like(tokens, num_sequences)
    else:
        denominators = tokens.sum().expand_as(tokens)
    return 1 / denominators.clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class GRPOLoss:
    """A loss to differentiate, and what its tokens were like: [T], detached, zero off the mask."""

    total: Tensor  # scalar: this microbatch's part of the loss of the whole batch
    per_token: Tensor  # weighted; sums to `total`
    log_ratio: Tensor  # log of new policy over old
    clipped_low: Tensor  # bool: the clip below took the gradient away
    clipped_high: Tensor  # bool: the clip above did, or bounded the weight
    kl: Tensor  # estimate of KL(policy || reference); zeros without a reference
    rollout_weight: Tensor  # of trainer over engine; ones without a correction
    off_policy: Tensor  # bool: left out, as a token of a sequence that the policy has left


def grpo_loss(
    logprobs: Tensor,
    entropy: Tensor,
    batch: PackedBatch,
    mask: Tensor,
    sequences: SequenceMeans,
    cfg: GRPOConfig,
    beta: float,
) -> GRPOLoss:
    """The loss of one microbatch's tokens: each one's objective (`objectives.py`), KL and entropy.

    For each token, with weights w from `loss_weights`, and factors m of 0 or 1, which are 1 unless
    the config says otherwise::

        loss = w (m_entropy m_off_policy objective + beta KL) - entropy_coef H / num_tokens

    The objective has the weight of trainer over engine in it. KL (`kl.py`) is that to the
    reference, times the ratio with `use_bias_correction_kl`: the unbiased gradient of the
    divergence, DeepSeek-V3.2 (arXiv 2512.02556). It is only reported where it was subtracted
    from the rewards. m_entropy leaves the tokens of the highest entropy (arXiv 2506.01939).

    Args:
        logprobs: [T], of the policy that is trained, in the index space of the packed tokens.
        entropy: [T], H of the distribution that each token was drawn from, with gradient.
        batch: the microbatch. Without `old_logprobs` the policy that generated is the present one:
            the ratio is then exactly 1, and the gradient that of the policy gradient.
        mask: [T] bool, the response tokens whose logprobs this rank computed. What other places
            hold has no influence.
        sequences: those of the batch, over `mask`.
        cfg: the options.
        beta: weight of the KL penalty in this step.
    """
    assert (batch.ref_logprobs is None) == (cfg.beta == 0.0), (
        "a reference is for the KL penalty, and only that"
    )
    # Off the mask all is 0: means over sequences carry gradients to tokens from their neighbours.
    logprobs = logprobs.where(mask, 0.0)
    advantages = batch.advantages.where(mask, 0.0)
    rollout = batch.rollout_logprobs.where(mask, 0.0).to(logprobs)
    old = logprobs.detach()
    if batch.old_logprobs is not None:
        old = batch.old_logprobs.where(mask, 0.0)
    log_ratio = logprobs - old
    weights = rollout_weights(old - rollout, sequences, cfg)
    found = objective(logprobs, log_ratio, advantages, weights, sequences, cfg)
    per_token = found.loss
    on_policy = torch.ones_like(mask)
    if cfg.off_policy_mask_threshold is not None:
        on_policy = on_policy_mask(
            logprobs.detach(), rollout, advantages, sequences, cfg.off_policy_mask_threshold
        )
        per_token = per_token.where(on_policy, 0.0)
    if batch.high_entropy is not None:
        per_token = per_token.where(batch.high_entropy, 0.0)

    kl = torch.zeros_like(logprobs)
    if batch.ref_logprobs is not None:
        kl = kl_estimate(logprobs, batch.ref_logprobs.where(mask, 0.0), cfg.kl_estimator)
        if not cfg.kl_in_reward:
            per_token = per_token + beta * _corrected(kl, logprobs, log_ratio, sequences, cfg)
    per_token = batch.loss_weights.where(mask, 0.0) * per_token
    if batch.entropy_weights is not None:
        bonus = batch.entropy_weights.where(mask, 0.0) * entropy.where(mask, 0.0)
        per_token = per_token - cfg.entropy_coef * bonus
    return GRPOLoss(
        total=per_token.sum(),
        per_token=per_token.detach(),
        log_ratio=log_ratio.detach(),
        clipped_low=mask & found.clipped_low,
        clipped_high=mask & found.clipped_high,
        kl=kl.detach(),
        rollout_weight=torch.ones_like(old) if weights is None else weights,
        off_policy=mask & ~on_policy,
    )


def _corrected(
    kl: Tensor, logprobs: Tensor, log_ratio: Tensor, sequences: SequenceMeans, cfg: GRPOConfig
) -> Tensor:
    if not cfg.use_bias_correction_kl:
        return kl
    return kl * importance_ratio(logprobs, log_ratio, sequences, cfg.importance_sampling_level)
