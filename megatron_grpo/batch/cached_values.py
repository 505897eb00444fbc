"""Per-token values computed when a generation began, which a resumed run must not recompute."""

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.batch.branches import values_by_sample
from megatron_grpo.batch.distribute import Minibatches
from megatron_grpo.batch.experience import Experience
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.config.config import Config
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
