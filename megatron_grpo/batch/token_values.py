"""Values of tokens that all ranks work out together, for the batches of `prepare.py`.

The entropies that the objective keeps, the weights of the entropy bonus, and the KL divergence from
the reference as a part of the reward (`grpo.kl_in_reward`).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.algorithm.kl import kl_estimate
from megatron_grpo.batch.distribute import Minibatches
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


def sequence_kl(minibatches: Minibatches, num_samples: int, groups: Groups) -> list[Tensor]:
    """Sum of KL(old policy || reference) over the response tokens: [num_samples] per minibatch.

    Estimated by k1, log old - log reference: used as a reward, only k1 has the gradient of the
    divergence. Collective, with the same result on all ranks; `num_samples` is the number of
    samples in an optimizer batch.
    """
    found = []
    for batches in minibatches:
        sums = torch.zeros(num_samples, dtype=torch.float64, device=batches[0].tokens.device)
        for batch in batches:
            if batch.old_logprobs is None or batch.ref_logprobs is None:
                continue  # only the last stage has them
            if not groups.answers_for(batch.context_size):
                continue  # other context ranks hold the same tokens
            kl = kl_estimate(batch.old_logprobs, batch.ref_logprobs, "k1")
            kl = kl.double().where(batch.loss_mask, 0.0)
            sums.index_add_(0, batch.sequence_index.clamp(min=0) % num_samples, kl)
        groups.reduce_over_tokens(sums)
        found.append(sums)
    return found


def by_sample(found: Sequence[Tensor], indices: Sequence[Sequence[int]]) -> Tensor:
    """Reorder the values of each minibatch's samples, `found`, by their index in the generation.

    `indices` are the samples of each minibatch. Returns [N] float64 on the CPU.
    """
    laid = torch.zeros(sum(map(len, indices)), dtype=torch.float64)
    for places, of_minibatch in zip(indices, found, strict=True):
        laid[list(places)] = of_minibatch.cpu()
    return laid


def with_advantages(minibatches: Minibatches, advantages: Sequence[Tensor]) -> Minibatches:
    """The minibatches with new advantages, [samples of the optimizer batch] for each of them."""
    return [
        [
            replace(
                batch,
                advantages=new[batch.sequence_index.clamp(min=0) % len(new)]
                .to(batch.advantages)
                .where(batch.loss_mask, 0.0),
            )
            for batch in batches
        ]
        for batches, new in zip(minibatches, advantages, strict=True)
    ]
