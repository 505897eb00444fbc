"""The KL divergence from the reference as a part of the reward: `grpo.kl_in_reward`."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_grpo.algorithm.kl import kl_estimate
from megatron_grpo.batch.distribute import Minibatches
from parallel.groups import Groups


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
