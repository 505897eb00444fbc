"""The entropies of an optimizer batch: those that the objective keeps, and the weights of the
entropy bonus."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.collectives import quantile
from parallel.groups import Groups
from parallel.packing import PackedBatch


def keep_high_entropy(
    batches: Sequence[PackedBatch],
    entropies: Sequence[Tensor],
    fraction: float,
    groups: Groups,
) -> list[PackedBatch]:
    """Keep the entropies of response tokens that are at least their (1 - `fraction`) quantile.

    arXiv 2506.01939. The quantile is exact over the whole optimizer batch: `entropies` [T] are of
    this rank's `batches`, and other ranks hold the others.
    """
    masked = [
        entropy[batch.loss_mask & groups.answers_for(batch.context_size)]
        for batch, entropy in zip(batches, entropies, strict=True)
    ]
    threshold = quantile(torch.cat(masked), 1 - fraction, groups.data_context)
    return [
        replace(batch, high_entropy=entropy.where(entropy.float() >= threshold, -torch.inf))
        for batch, entropy in zip(batches, entropies, strict=True)
    ]


def with_entropy_weights(batches: Sequence[PackedBatch], groups: Groups) -> list[PackedBatch]:
    """Weight the entropies of the optimizer batch, for the entropy bonus, so that they sum to their
    mean over the tokens of the objective: whatever the loss type, as in TRL."""
    chosen = [
        b.loss_mask if b.high_entropy is None else b.loss_mask & ~b.high_entropy.isneginf()
        for b in batches
    ]
    count = torch.stack(
        [
            mask.sum() * groups.answers_for(batch.context_size)
            for batch, mask in zip(batches, chosen, strict=True)
        ]
    ).sum()
    dist.all_reduce(count, group=groups.data_context)
    return [
        replace(batch, entropy_weights=mask.to(batch.loss_weights) / count.clamp(min=1))
        for batch, mask in zip(batches, chosen, strict=True)
    ]
