"""Moving packed microbatches from the rank that rolled out to the ranks that train on them."""

import torch
import torch.distributed as dist

from parallel.groups import Groups
from parallel.packing import PackedBatch

Minibatches = list[list[PackedBatch]]
"""What one data-parallel rank trains on: for every optimizer step its microbatches."""


def distribute(
    shares: list[Minibatches] | None, groups: Groups, device: torch.device
) -> Minibatches:
    """Give every rank its data-parallel share, on its device.

    `shares`, one for each data rank, is read on rank 0 only; the others pass None.

    Two hops, so that nobody sends more than one copy of anything down a path: rank 0 scatters to
    the first rank of every model replica, and that rank broadcasts inside its replica.
    """
    received: list[Minibatches | None] = [None]
    leader = groups.dims.replica_ranks(groups.coordinates.data)[0]
    if groups.rank == leader:
        dist.scatter_object_list(received, shares, src=0, group=groups.data_gloo)
    dist.broadcast_object_list(received, src=leader, group=groups.replica)
    assert received[0] is not None
    return [[batch.to(device) for batch in minibatch] for minibatch in received[0]]
