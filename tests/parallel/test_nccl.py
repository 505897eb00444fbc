"""The order in which ranks reach their communicators, and NCCL's errors."""

import ctypes
from graphlib import TopologicalSorter
from itertools import pairwise

import pytest
import torch.distributed as dist

from helpers.ranks.processes import run_ranks
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import init_groups
from parallel.nccl import SUSPEND_MEM, Communicators, call_nccl, created_groups


def names_of_groups(rank: int, dims: ParallelDims) -> list[str]:
    """Names of this rank's groups in order; a group has the same name on all of its ranks."""
    setup_device(rank)
    init_groups(dims, dynamic_context=dims.context > 1)
    communicators = Communicators()
    for _ in range(2):  # CPU groups have no communicator
        communicators.suspend()
        communicators.resume()
        communicators.resume()
    return [group.group_name for group in created_groups()]


@pytest.mark.parametrize(
    "dims",
    [ParallelDims(tensor=2, pipeline=2), ParallelDims(context=4), ParallelDims(expert=2, data=4)],
    ids=str,
)
def test_ranks_never_wait_for_each_other_in_a_circle(dims):
    ranks = run_ranks(4, names_of_groups, dims)
    assert len(set.intersection(*map(set, ranks))) > 1 and all(map(len, ranks))
    order: TopologicalSorter[str] = TopologicalSorter()
    for names in ranks:
        for earlier, later in pairwise(names):
            order.add(later, earlier)
    order.prepare()  # raises CycleError


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs NCCL")
def test_call_nccl_raises_nccls_own_words():
    """NCCL refuses a null communicator even without a GPU."""
    for name, options in (("ncclCommSuspend", [SUSPEND_MEM]), ("ncclCommResume", [])):
        with pytest.raises(dist.DistBackendError, match=f"{name}: invalid argument.*{name}.*NULL"):
            call_nccl(name, ctypes.c_void_p(), *options)
