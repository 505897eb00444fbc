"""Process groups of the mesh: the only place that calls Megatron-Core's parallel state.

`Groups` is passed as an argument; only Megatron-Core itself reads its global state.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property

import torch
from megatron.core import parallel_state
from torch.distributed import ProcessGroup, ReduceOp

from parallel.dims import Coordinates, ParallelDims, divisors


@dataclass(frozen=True, kw_only=True)
class Groups:
    """This rank's position in the mesh and the groups in which it communicates."""

    dims: ParallelDims
    coordinates: Coordinates
    rank: int
    tensor: ProcessGroup
    expert_tensor: ProcessGroup
    """Ranks that each hold a part of the same experts."""
    pipeline: ProcessGroup
    contexts: Mapping[int, ProcessGroup]
    """By size, groups of neighbours on the context axis that can split a microbatch: the whole
    axis, and with dynamic context parallelism each divisor of it."""
    data: ProcessGroup
    data_gloo: ProcessGroup
    """Ranks of `data`, over gloo: for Python objects."""
    data_context: ProcessGroup
    """Ranks that hold the same weights; gradients are summed over this group."""
    stage: ProcessGroup
    """All ranks of this rank's pipeline stage (tensor x context x data)."""
    replica: ProcessGroup
    """Ranks of one model copy (tensor x context x pipeline), over gloo: for Python objects."""

    def answers_for(self, size: int) -> bool:
        """Whether this rank is the first of the `size` context ranks that split a microbatch."""
        return self.coordinates.context % size == 0

    def reduce_over_tokens(
        self, tensor: torch.Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM
    ) -> None:
        """All-reduce `tensor` in place over the ranks with other tokens, and over pipeline stages.

        Only the last stage has values of its tokens; earlier stages pass the neutral element of
        `op`, such as 0 for a sum.
        """
        torch.distributed.all_reduce(tensor, op, group=self.data_context)
        torch.distributed.all_reduce(tensor, op, group=self.pipeline)

    @cached_property
    def is_dynamic(self) -> bool:
        """Whether microbatches are split over different numbers of context ranks."""
        return len(self.contexts) > 1


def init_groups(
    dims: ParallelDims,
    timeout: timedelta = timedelta(minutes=30),
    *,
    dynamic_context: bool = False,
) -> Groups:
    """Create every group of `dims`; collective over all ranks of the initialised default group.

    Raises ValueError, naming all factors, if the mesh does not match the world size.
    """
    rank = torch.distributed.get_rank()
    dims.check_world_size(torch.distributed.get_world_size())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=dims.tensor,
        pipeline_model_parallel_size=dims.pipeline,
        virtual_pipeline_model_parallel_size=(
            dims.virtual_pipeline if dims.virtual_pipeline > 1 else None
        ),
        context_parallel_size=dims.context,
        expert_model_parallel_size=dims.expert,
        expert_tensor_parallel_size=dims.expert_tensor,
        order="tp-cp-ep-dp-pp",
        # Megatron-Core takes whole minutes.
        distributed_timeout_minutes=math.ceil(timeout / timedelta(minutes=1)),
        create_gloo_process_groups=True,  # required by the distributed optimizer
    )
    return Groups(
        dims=dims,
        coordinates=dims.coordinates(rank),
        rank=rank,
        tensor=parallel_state.get_tensor_model_parallel_group(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_group(),
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
        contexts=_context_groups(dims, rank, timeout, dynamic_context),
        data=parallel_state.get_data_parallel_group(),
        data_gloo=parallel_state.get_data_parallel_group_gloo(),
        data_context=parallel_state.get_data_parallel_group(with_context_parallel=True),
        stage=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        replica=_replica_group(dims, dims.coordinates(rank).data, timeout),
    )


def destroy_groups() -> None:
    """Destroy Megatron's groups; the default group stays."""
    parallel_state.destroy_model_parallel()


def _context_groups(
    dims: ParallelDims, rank: int, timeout: timedelta, dynamic: bool
) -> dict[int, ProcessGroup]:
    groups = {dims.context: parallel_state.get_context_parallel_group()}
    at = dims.coordinates(rank)
    for size in divisors(dims.context)[:-1] if dynamic else ():
        first = at.context // size * size
        ranks = [dims.rank(replace(at, context=first + place)) for place in range(size)]
        # Created by its members only: a large job has thousands of such groups.
        groups[size] = torch.distributed.new_group(ranks, timeout, use_local_synchronization=True)
    return groups


def _replica_group(dims: ParallelDims, data: int, timeout: timedelta) -> ProcessGroup:
    # Every rank must take part in the creation of every group, in the same order.
    groups = [
        torch.distributed.new_group(dims.replica_ranks(index), timeout, backend="gloo")
        for index in range(dims.data)
    ]
    return groups[data]
