"""Values of tokens that all ranks compute together, for the batches of `prepare.py`.

These are the entropies that the objective keeps, the weights of the entropy bonus, and the KL
divergence from the reference as a part of the reward (`grpo.kl_in_reward`).
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
    """Keep the entropies of response tokens in the top `fraction` (arXiv 2506.01939); others become
    -inf. The threshold is the exact quantile over the whole optimizer batch: `entropies` [T] belong
    to this rank's `batches`, and other ranks add theirs."""
    masked = [
        entropy[batch.loss_mask & groups.answers_for(batch.context_size)]
        for batch, entropy in zip(batches, entropies, strict=True)
    ]
    threshold = quantile(torch.cat(masked), 1 - fraction, groups.data_context)
    # Compared in float32, the dtype of the quantile's values.
    return [
        replace(batch, high_entropy=entropy.where(entropy.float() >= threshold, -torch.inf))
        for batch, entropy in zip(batches, entropies, strict=True)
    ]


def with_entropy_weights(batches: Sequence[PackedBatch], groups: Groups) -> list[PackedBatch]:
    """Weight entropies for the entropy bonus: the weighted sum is their mean over the objective's
    tokens. This holds for every loss type, as in TRL."""
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

    Collective, with the same result on all ranks; `num_samples` is the number of samples in an
    optimizer batch.
    """
    found = []
    for batches in minibatches:
        sums = torch.zeros(num_samples, dtype=torch.float64, device=batches[0].tokens.device)
        for batch in batches:
            if batch.old_logprobs is None or batch.ref_logprobs is None:
                continue  # only the last stage has them
            if not groups.answers_for(batch.context_size):
                continue  # other context ranks hold the same tokens
            # k1, log old - log reference: as a reward, only k1 has the divergence's gradient.
            kl = kl_estimate(batch.old_logprobs, batch.ref_logprobs, "k1")
            kl = kl.double().where(batch.loss_mask, 0.0)
            # Tokens without a sequence have index -1, and add 0 to sample 0.
            sums.index_add_(0, batch.sequence_index.clamp(min=0) % num_samples, kl)
        groups.reduce_over_tokens(sums)
        found.append(sums)
    return found


def by_sample(found: Sequence[Tensor], indices: Sequence[Sequence[int]]) -> Tensor:
    """Reorder each minibatch's values of samples, `found`, by their index in the generation.

    `indices` are the samples of each minibatch. Returns [N] float64 on the CPU.
    """
    laid = torch.zeros(sum(map(len, indices)), dtype=torch.float64)
    for places, of_minibatch in zip(indices, found, strict=True):
        laid[list(places)] = of_minibatch.cpu()
    return laid


def with_advantages(minibatches: Minibatches, advantages: Sequence[Tensor]) -> Minibatches:
    """Replace the advantages of the minibatches; `advantages` are [samples of the optimizer batch]
    each."""
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
