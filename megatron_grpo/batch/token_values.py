"""Values of tokens that all ranks work out together, for the batches of `prepare.py`.

Those computed when a generation began, which a resumed run must not recompute; the entropies that
the objective keeps, and the weights of the entropy bonus; and the KL divergence from the reference
as a part of the reward (`grpo.kl_in_reward`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.algorithm.kl import kl_estimate
from megatron_grpo.batch.branches import values_by_sample
from megatron_grpo.batch.distribute import Minibatches
from megatron_grpo.batch.experience import Experience
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.config.config import Config
from parallel.collectives import quantile
from parallel.groups import Groups
from parallel.packing import PackedBatch


def with_cached_values(
    experience: Experience | None,
    minibatches: Minibatches,
    generation: int,
    cfg: Config,
    groups: Groups,
) -> Experience | None:
    """Return, on rank 0, the `experience` with the values that all ranks hold; collective.

    `minibatches` are this rank's share of the generation's optimizer batches.
    """
    indices = BatchSchedule.of(cfg.grpo).minibatches(generation, cfg.train.seed)
    known: dict[str, Any] = {
        name: _collected(experience, minibatches, indices, attrgetter(name), groups)
        for name in _names(cfg)
    }
    return replace(experience, **known) if experience else None


def _names(cfg: Config) -> list[str]:
    names = ["old_logprobs"]
    if cfg.grpo.beta > 0:
        names.append("ref_logprobs")
    if cfg.grpo.top_entropy_quantile < 1:
        names.append("high_entropy")
    return names


def _collected(
    experience: Experience | None,
    minibatches: Minibatches,
    indices: list[list[int]],
    values: Callable[[PackedBatch], Tensor | None],
    groups: Groups,
) -> list[Tensor] | None:
    """On rank 0, the `values` of each sample of the generation, in order."""
    collected = collect_values(minibatches, values, groups)
    if collected is None or experience is None:
        return None
    found: dict[int, Tensor] = {}
    for of_minibatch, chosen in zip(zip(*collected, strict=True), indices, strict=True):
        sequences = {number: v for of_rank in of_minibatch for number, v in of_rank.items()}
        found |= values_by_sample(experience.samples, chosen, sequences)
    nothing = torch.zeros(0)  # for a completion without tokens
    return [found.get(i, nothing) for i in range(len(experience.samples))]


def collect_values(
    minibatches: Minibatches, values: Callable[[PackedBatch], Tensor | None], groups: Groups
) -> list[list[dict[int, Tensor]]] | None:
    """Gather the `values` [T] of all completion tokens on rank 0; returns None on the other ranks.

    The result holds, for each data and context rank and optimizer step, the float32 values
    [completion tokens] of each sequence, by its number in the optimizer batch. Two hops: from the
    last pipeline stage, which alone has the values, to the first, and from there to rank 0.
    """
    stages = dist.get_process_group_ranks(groups.pipeline)
    mine = [_by_sequence(minibatch, values, stages[-1], groups) for minibatch in minibatches]
    if groups.coordinates.tensor or groups.coordinates.pipeline:
        return None
    gathered: list[list[dict[int, Tensor]]] | None = None
    if groups.rank == 0:
        gathered = [[] for _ in range(groups.dims.data * groups.dims.context)]
    dist.gather_object(mine, gathered, dst=0, group=groups.data_context_gloo)
    return gathered


def _by_sequence(
    minibatch: list[PackedBatch],
    values: Callable[[PackedBatch], Tensor | None],
    last_stage: int,
    groups: Groups,
) -> dict[int, Tensor]:
    found = {}
    for batch in minibatch:
        known = values(batch)
        if known is None:
            known = torch.empty_like(batch.rollout_logprobs)
        known = known.to("cpu", batch.rollout_logprobs.dtype)  # engines may have the GPU
        dist.broadcast(known, src=last_stage, group=groups.pipeline)
        if not groups.answers_for(batch.context_size):
            continue
        sequences, is_completion = batch.sequence_index.cpu(), batch.completion_mask.cpu()
        for index in sequences[is_completion].unique().tolist():
            found[index] = known[(sequences == index) & is_completion]
    return found


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
