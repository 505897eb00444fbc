import tempfile

import psutil
import pytest
import torch
import torch.distributed as dist

from helpers.ranks.processes import run_ranks
from parallel import Coordinates, ParallelDims
from parallel.cpu_device import communication_backend, setup_device
from parallel.fake_rank import fake_rank
from parallel.groups import Groups, init_groups

DIMS = ParallelDims(tensor=2, context=2, pipeline=2)
NAMES = ("tensor", "context", "data", "pipeline", "data_context", "replica")


def ranks_of_groups(rank: int, dims: ParallelDims) -> dict[str, list[int]]:
    setup_device(rank)
    groups = init_groups(dims)
    assert groups.coordinates == dims.coordinates(rank)
    return {
        name: torch.distributed.get_process_group_ranks(group_named(groups, name))
        for name in (*NAMES, "data_gloo")
    }


def group_named(groups: Groups, name: str) -> torch.distributed.ProcessGroup:
    return groups.contexts[groups.dims.context] if name == "context" else getattr(groups, name)


def along(dims: ParallelDims, at: Coordinates, axes: tuple[str, ...]) -> list[int]:
    """Ranks whose coordinates differ from `at` only in `axes`."""
    others = set(vars(at)) - set(axes)
    return [
        rank
        for rank in range(dims.world_size)
        if all(getattr(dims.coordinates(rank), axis) == getattr(at, axis) for axis in others)
    ]


def check(groups: dict[str, list[int]], dims: ParallelDims, rank: int) -> None:
    at = dims.coordinates(rank)
    for axis in ("tensor", "context", "data", "pipeline"):
        assert groups[axis] == along(dims, at, (axis,))
    assert groups["data_context"] == along(dims, at, ("data", "context"))
    assert groups["replica"] == along(dims, at, ("tensor", "context", "pipeline"))


@pytest.mark.parametrize(
    "dims", [DIMS, ParallelDims(tensor=2, data=2, pipeline=2), ParallelDims(context=2, data=2)]
)
def test_every_group_is_the_ranks_along_its_axes(dims):
    for rank, groups in enumerate(run_ranks(dims.world_size, ranks_of_groups, dims)):
        check(groups, dims, rank)
        assert groups["data_gloo"] == groups["data"]


def ranks_of_fake_groups(dims: ParallelDims, rank: int) -> dict[str, list[int]]:
    setup_device(0)
    with fake_rank(dims, rank) as groups:
        assert groups.coordinates == dims.coordinates(rank)
        assert groups.data_context.rank() == groups.coordinates.context + dims.context * (
            groups.coordinates.data
        )
        return {
            name: torch.distributed.get_process_group_ranks(group_named(groups, name))
            for name in NAMES
        }


def test_a_fake_rank_of_a_large_job_is_in_the_groups_of_the_real_one(elsewhere):
    dims = ParallelDims(tensor=8, context=2, data=4, pipeline=16)
    for rank in (0, 777, 1023):
        check(elsewhere(ranks_of_fake_groups, dims, rank), dims, rank)


def connections_before_and_after_a_collective(rank: int, dims: ParallelDims) -> tuple[int, int]:
    dist.barrier()  # or a rank that still connects would find the others gone
    dist.destroy_process_group()  # `run_ranks` has initialised it without a device
    setup_device(rank)
    size = dims.world_size
    store = dist.FileStore(f"{tempfile.tempdir}/store_of_all_groups", size)
    dist.init_process_group(communication_backend(), store=store, rank=rank, world_size=size)
    init_groups(dims)
    before = connections_of_all_ranks(store, "before")[rank]
    dist.all_reduce(torch.zeros(1))
    return before, connections_of_all_ranks(store, "after")[rank]


def connections_of_all_ranks(store: dist.Store, moment: str) -> list[int]:
    """Number of connections by rank; no rank goes on, and connects, before all have counted."""
    connections = psutil.Process().net_connections("tcp")
    num_established = sum(each.status == psutil.CONN_ESTABLISHED for each in connections)
    store.set(f"{moment}/{dist.get_rank()}", str(num_established))
    return [int(store.get(f"{moment}/{rank}")) for rank in range(dist.get_world_size())]


def test_ranks_connect_only_to_ranks_that_they_exchange_data_with():
    dims = ParallelDims(tensor=2, pipeline=2)
    neighbours = 2  # in the ring of an all-reduce
    assert run_ranks(4, connections_before_and_after_a_collective, dims) == [(0, neighbours)] * 4
