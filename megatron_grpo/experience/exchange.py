"""Moving sequences from rank 0 to the ranks that train on them, and per-token values back."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.groups import Groups
from parallel.packing import PackedBatch
from parallel.share import Share

Minibatches = list[list[PackedBatch]]
"""What one data-parallel rank trains on: its microbatches for each optimizer step."""


def distribute(shares: list[Share] | None, groups: Groups) -> Share:
    """Give every rank its data-parallel share of an optimizer batch.

    `shares`, one for each data rank, is read on rank 0 only; the others pass None.

    Done in two hops, so that no data is sent twice over the same path: rank 0 scatters to the first
    rank of every model replica, which broadcasts within its replica.
    """
    received: list[Share | None] = [None]
    leader = groups.dims.replica_ranks(groups.coordinates.data)[0]
    if groups.rank == leader:
        dist.scatter_object_list(received, shares, src=0, group=groups.data_gloo)
    dist.broadcast_object_list(received, src=leader, group=groups.replica)
    assert received[0] is not None
    return received[0]


def collect_values(
    minibatches: Minibatches, values: Callable[[PackedBatch], Tensor | None], groups: Groups
) -> list[list[dict[int, Tensor]]] | None:
    """Gather the `values` [T] of all completion tokens on rank 0; returns None on the other ranks.

    The result holds, for each data rank and optimizer step, the float32 values [completion tokens]
    of each sequence, by its index in the optimizer batch. Two hops, like `distribute`: from the
    last pipeline stage, which alone has the values, to the first, and from the first rank of every
    model replica to rank 0.
    """
    stages = dist.get_process_group_ranks(groups.pipeline)
    mine = [_by_sequence(minibatch, values, stages[-1], groups) for minibatch in minibatches]
    if groups.rank != groups.dims.replica_ranks(groups.coordinates.data)[0]:
        return None
    gathered: list[list[dict[int, Tensor]]] | None = None
    if groups.rank == 0:
        gathered = [[] for _ in range(groups.dims.data)]
    dist.gather_object(mine, gathered, dst=0, group=groups.data_gloo)
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
        known = known.to(batch.rollout_logprobs.dtype)
        dist.broadcast(known, src=last_stage, group=groups.pipeline)
        for index in batch.sequence_index[batch.completion_mask].unique().tolist():
            of_sequence = (batch.sequence_index == index) & batch.completion_mask
            found[index] = known[of_sequence].cpu()
    return found
