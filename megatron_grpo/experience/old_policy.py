"""Values computed once per generation, before any training on it.

These are the log-probabilities of the old policy and of the reference, and the tokens that the
objective is taken over.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.config.config import Config
from megatron_grpo.policy.logprobs import compute_logprobs
from megatron_grpo.policy.model import Model, Policy
from parallel.groups import Groups
from parallel.packing import PackedBatch
from parallel.quantile import quantile


def add_logprobs(
    batches: Sequence[PackedBatch],
    policy: Policy,
    reference: Model | None,
    cfg: Config,
    groups: Groups,
) -> list[PackedBatch]:
    """Fill in `old_logprobs`, `ref_logprobs` if there is a reference, and the entropy fields.

    `batches` are this rank's part of one optimizer batch; ranks before the last stage get them back
    unchanged. With one update per generation the old policy is the policy itself, and its pass is
    skipped unless something else needs it: the ratio is exactly 1, and the loss uses its own
    log-probabilities, detached. Values that a resumed generation already has are kept, since either
    model may have changed since.
    """
    filled, entropies = _with_old_logprobs(batches, policy, cfg, groups)
    if reference and batches[0].ref_logprobs is None:
        filled = _filled(
            filled,
            "ref_logprobs",
            [logprobs for logprobs, _ in _computed(reference, batches, cfg, groups)],
        )
    if not policy.is_last_stage:
        return filled
    if cfg.grpo.top_entropy_quantile < 1 and batches[0].high_entropy is None:
        share = cfg.grpo.top_entropy_quantile
        filled = keep_high_entropy(filled, entropies, share, groups.data)
    return with_entropy_weights(filled, groups.data) if cfg.grpo.entropy_coef else filled


def _with_old_logprobs(
    batches: Sequence[PackedBatch], policy: Policy, cfg: Config, groups: Groups
) -> tuple[list[PackedBatch], list[Tensor]]:
    """The batches, and the policy's entropies if they were computed."""
    if cfg.grpo.old_logprobs == "rollout":
        batches = [replace(batch, old_logprobs=batch.rollout_logprobs) for batch in batches]
    if not _needs_policy(batches, cfg):
        return list(batches), []
    computed = _computed(policy, batches, cfg, groups)
    if batches[0].old_logprobs is None:
        batches = _filled(batches, "old_logprobs", [logprobs for logprobs, _ in computed])
    return list(batches), [entropy for _, entropy in computed]


def _computed(
    model: Model, batches: Sequence[PackedBatch], cfg: Config, groups: Groups
) -> list[tuple[Tensor, Tensor]]:
    return compute_logprobs(model, batches, cfg.rollout.temperature, groups) or []


def _filled(
    batches: Sequence[PackedBatch], name: str, values: Sequence[Tensor]
) -> list[PackedBatch]:
    """The batches with `values` in field `name`; before the last stage there are no values."""
    if not values:
        return list(batches)
    of_batch: list[dict[str, Any]] = [{name: value} for value in values]
    return [replace(batch, **new) for batch, new in zip(batches, of_batch, strict=True)]


def _needs_policy(batches: Sequence[PackedBatch], cfg: Config) -> bool:
    if cfg.grpo.top_entropy_quantile < 1 and batches[0].high_entropy is None:
        return True
    return batches[0].old_logprobs is None and cfg.grpo.needs_old_pass


def keep_high_entropy(
    batches: Sequence[PackedBatch],
    entropies: Sequence[Tensor],
    share: float,
    data_group: dist.ProcessGroup,
) -> list[PackedBatch]:
    """Mark the tokens whose entropy is at least the (1 - `share`) quantile of all response tokens.

    arXiv 2506.01939. The quantile is exact over the whole optimizer batch: `entropies` [T] are of
    this rank's `batches`, and the ranks of `data_group` hold the others.
    """
    masked = [entropy[batch.loss_mask] for batch, entropy in zip(batches, entropies, strict=True)]
    threshold = quantile(torch.cat(masked), 1 - share, data_group)
    return [
        replace(batch, high_entropy=(entropy.float() >= threshold) & batch.loss_mask)
        for batch, entropy in zip(batches, entropies, strict=True)
    ]


def with_entropy_weights(
    batches: Sequence[PackedBatch], data_group: dist.ProcessGroup
) -> list[PackedBatch]:
    """Weight the entropies of the optimizer batch so that they sum to their mean over tokens.

    The mean is over the tokens of the objective, whatever the loss type, as in TRL.
    """
    chosen = [
        batch.loss_mask if batch.high_entropy is None else batch.high_entropy for batch in batches
    ]
    count = torch.stack([mask.sum() for mask in chosen]).sum()
    dist.all_reduce(count, group=data_group)
    return [
        replace(batch, entropy_weights=mask.to(batch.loss_weights) / count.clamp(min=1))
        for batch, mask in zip(batches, chosen, strict=True)
    ]
