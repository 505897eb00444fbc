"""GRPO loss of one microbatch, over its response tokens.

Token weights are global: the losses of microbatches and ranks add up.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.algorithm.kl import kl_estimate
from megatron_grpo.algorithm.loss_function import LossFunction
from megatron_grpo.algorithm.objectives import importance_ratio, mismatch_weights, on_policy_mask
from megatron_grpo.config.grpo import GRPOConfig, LossAggregation
from parallel.logprobs import ChosenTokens
from parallel.packing import PackedBatch
from parallel.sequences import SequenceMeans, counted_lengths


@dataclass(frozen=True, kw_only=True)
class LossTokens:
    """The K counted tokens of a packed microbatch on this rank, in packed order; [K] each."""

    logprobs: Tensor
    """Log-probabilities under the policy being trained, with gradient."""
    entropy: Tensor
    """Entropy of the policy's distribution over this token, with gradient."""
    weights: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor | None
    """Log-probabilities under the generating policy; None if that is the current policy."""
    ref_logprobs: Tensor | None
    high_entropy: Tensor | None
    """Entropies of tokens in the objective, -inf for excluded tokens; None: all are included."""
    entropy_weights: Tensor | None
    """Weight of each token's entropy in the bonus; None without a bonus."""
    sequences: SequenceMeans
    """Sums and means over the n segments of the microbatch (see `PackedBatch`)."""
    sequence_index: Tensor
    """[n] index of each segment in the optimizer batch; -1 for shared prompts and padding."""
    log_rows: Tensor | None
    """Rows in the log of tokens, -1 for tokens without; None if no token of the microbatch has a
    row."""

    @classmethod
    def select(
        cls,
        batch: PackedBatch,
        chosen: ChosenTokens,
        context_group: dist.ProcessGroup | None = None,
    ) -> "LossTokens":
        """Select `chosen` tokens of `batch`; one rank of `context_group` chooses each token.

        Values of other tokens in `batch` have no influence, even if NaN.
        """

        def at(values: Tensor) -> Tensor:
            return values.index_select(0, chosen.positions)  # in 2/3 of the time of indexing

        def at_if(values: Tensor | None) -> Tensor | None:
            return None if values is None else at(values)

        starts = batch.cu_seqlens[:-1].long()
        return cls(
            logprobs=chosen.logprobs,
            entropy=chosen.entropy,
            weights=at(batch.loss_weights),
            advantages=at(batch.advantages),
            rollout_logprobs=at(batch.rollout_logprobs).to(chosen.logprobs),
            old_logprobs=at_if(batch.old_logprobs),
            ref_logprobs=at_if(batch.ref_logprobs),
            high_entropy=at_if(batch.high_entropy),
            entropy_weights=at_if(batch.entropy_weights),
            sequences=SequenceMeans(
                counted_lengths(batch.cu_seqlens, chosen.positions), context_group
            ),
            sequence_index=batch.sequence_index[starts],
            log_rows=at_if(batch.log_rows),
        )


def loss_weights(lengths: Tensor, aggregation: LossAggregation, constant: float) -> Tensor:
    """Weight of a response token in each of the N sequences of the whole optimizer batch.

    With L_i response tokens in sequence i:

    - "sequence": 1 / (N L_i), the mean over sequences of the per-sequence means (GRPO, arXiv
      2402.03300, eq. 3);
    - "token": 1 / sum L, the mean over all tokens (DAPO, arXiv 2503.14476, eq. 8). Elsewhere bnpo
      is the mean over one device's tokens, and the loss depends on the layout; here it equals dapo;
    - "constant": 1 / (N `constant`), without the bias of "sequence" towards short correct and long
      wrong answers (Dr. GRPO, arXiv 2503.20783, with the longest completion as constant);
    - "sum": 1 / N, a sum over tokens and a mean over sequences (LUSPO, arXiv 2602.05261).

    Weights are global: the loss is a sum of weighted tokens over microbatches, context and data
    ranks, and is not divided later.

    `lengths` [N]: numbers of counted response tokens, 0 for a fully masked sequence. Returns [N]
    float64, always finite: a sequence without counted tokens has an unused weight.
    """
    tokens, num_sequences = lengths.double(), len(lengths)
    denominators = {
        "sequence": num_sequences * tokens.clamp(min=1),
        "token": tokens.sum().clamp(min=1).expand_as(tokens),
        "constant": torch.full_like(tokens, num_sequences * constant),
        "sum": torch.full_like(tokens, num_sequences),
    }
    return 1 / denominators[aggregation]


@dataclass(frozen=True, kw_only=True)
class GRPOLoss:
    """A loss to differentiate, and detached values [K] of its K tokens for the metrics."""

    total: Tensor  # scalar: this microbatch's part of the loss of the whole batch
    per_token: Tensor  # weighted; sums to `total`
    policy_loss: Tensor  # the loss without KL penalty and entropy bonus
    log_ratio: Tensor  # log(new policy / old policy)
    clipped_low: Tensor  # bool: the lower clip removed the gradient
    clipped_high: Tensor  # bool: the upper clip removed the gradient or bounded the weight
    values: dict[str, Tensor]  # all values that the loss function returned beside the losses
    kl: Tensor | None  # estimate of KL(policy || reference); None without a reference
    rollout_weight: Tensor | None  # importance weight trainer / engine; None without a correction
    off_policy: Tensor | None  # bool: masked because its sequence is too far off-policy


def grpo_loss(tokens: LossTokens, cfg: GRPOConfig, function: LossFunction, beta: float) -> GRPOLoss:
    """Loss of one microbatch's tokens: objective (`function`), KL penalty and entropy bonus.

    For each token, with the weight w from `loss_weights` and masks m in {0, 1}, which are 1 unless
    configured::

        loss = w (m_entropy m_off_policy objective + beta KL) - entropy_coef H / num_tokens

    The objective includes the importance weight of trainer over engine. KL (`kl.py`) is the
    divergence from the reference; `use_bias_correction_kl` multiplies it by the ratio, for the
    unbiased gradient of the divergence (DeepSeek-V3.2, arXiv 2512.02556). With `kl_in_reward`, KL
    is only reported. m_entropy keeps the tokens of highest entropy (arXiv 2506.01939). Without old
    log-probabilities, the generating policy is the current one: the ratio is exactly 1, and the
    gradient the plain policy gradient.
    """
    assert (tokens.ref_logprobs is None) == (cfg.beta == 0.0), (
        f"beta is {cfg.beta}: reference log-probabilities are needed if and only if it is not 0"
    )
    logprobs, advantages, sequences = tokens.logprobs, tokens.advantages, tokens.sequences
    old = logprobs.detach() if tokens.old_logprobs is None else tokens.old_logprobs
    log_ratio = logprobs - old
    weights = mismatch_weights(old - tokens.rollout_logprobs, sequences, cfg)
    per_token, values = function(
        logprobs=logprobs,
        log_ratio=log_ratio,
        advantages=advantages,
        entropy=tokens.entropy,
        rollout_weights=weights,
        sequences=sequences,
    )
    values = {name: each.detach() for name, each in values.items()}
    off_policy, kl, never = None, None, torch.zeros_like(advantages, dtype=torch.bool)
    if cfg.off_policy_mask_threshold is not None:
        sampled, threshold = tokens.rollout_logprobs, cfg.off_policy_mask_threshold
        off_policy = ~on_policy_mask(logprobs.detach(), sampled, advantages, sequences, threshold)
        per_token = per_token.masked_fill(off_policy, 0.0)
    if tokens.high_entropy is not None:
        per_token = per_token.masked_fill(tokens.high_entropy.isneginf(), 0.0)
    policy_loss = (tokens.weights * per_token).detach()
    if tokens.ref_logprobs is not None:
        kl = kl_estimate(logprobs, tokens.ref_logprobs, cfg.kl_estimator)
        if not cfg.kl_in_reward:
            weight = _kl_weight(tokens, log_ratio, cfg)
            per_token = per_token + beta * (kl if weight is None else kl * weight)
    per_token = tokens.weights * per_token
    if tokens.entropy_weights is not None:
        per_token = per_token - cfg.entropy_coef * tokens.entropy_weights * tokens.entropy
    return GRPOLoss(
        total=per_token.sum(),
        per_token=per_token.detach(),
        policy_loss=policy_loss,
        log_ratio=log_ratio.detach(),
        clipped_low=values.get("clipped_low", never),
        clipped_high=values.get("clipped_high", never),
        values=values,
        kl=None if kl is None else kl.detach(),
        rollout_weight=weights,
        off_policy=off_policy,
    )


def _kl_weight(tokens: LossTokens, log_ratio: Tensor, cfg: GRPOConfig) -> Tensor | None:
    """Factor [K] of the KL penalty; None for 1."""
    if not cfg.use_bias_correction_kl:
        return None
    level = cfg.importance_sampling_level
    return importance_ratio(tokens.logprobs, log_ratio, tokens.sequences, level)
