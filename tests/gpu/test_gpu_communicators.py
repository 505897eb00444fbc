"""Suspended NCCL communicators: their memory is free, and they work again afterwards."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.ranks.processes import run_ranks
from parallel.nccl import Communicators

CYCLES = 3


def communicate(rank: int, num_ranks: int, groups: list[dist.ProcessGroup]) -> None:
    """An all-reduce in every group, and a send with a receive in one batch as in a pipeline."""
    for number, group in enumerate(groups, start=1):
        values = torch.full((1 << 20,), float(number * (rank + 1)), device="cuda")
        dist.all_reduce(values, group=group)
        assert (values == number * num_ranks * (num_ranks + 1) / 2).all()
        sent, received = torch.full_like(values, float(rank)), torch.full_like(values, -1.0)
        peer, source = (rank + 1) % num_ranks, (rank - 1) % num_ranks
        exchanged = [
            dist.P2POp(dist.isend, sent, peer, group),
            dist.P2POp(dist.irecv, received, source, group),
        ]
        for work in dist.batch_isend_irecv(exchanged) if num_ranks > 1 else []:
            work.wait()
        assert num_ranks == 1 or (received == source).all()


def leave_and_come_back(rank: int, num_ranks: int) -> list[tuple[list[int], int, int]]:
    """For each cycle: whether communicators are suspended, bytes that became free, and should."""
    torch.cuda.set_device(rank)
    groups = [dist.group.WORLD, dist.new_group(), dist.new_group()]
    unused = dist.new_group()
    communicators, found = Communicators(), []
    communicate(rank, num_ranks, groups)
    for _ in range(CYCLES):
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        communicators.suspend()
        dist.all_reduce(torch.zeros(1))  # over gloo, also until all have freed theirs
        freed = torch.cuda.mem_get_info()[0] - free
        stats = [backend(group).memory_stats() for group in groups]
        communicators.resume()
        communicate(rank, num_ranks, groups)
        away = [each["suspended"] for each in stats]
        found.append((away, freed, sum(each["suspend"] for each in stats)))
    communicators.suspend()
    dist.destroy_process_group(groups.pop())  # as at the end of a run: while it is away
    communicators.resume()
    communicate(rank, num_ranks, [*groups, unused])
    return found


def backend(group: dist.ProcessGroup) -> Any:
    return group._get_backend(torch.device("cuda"))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_suspended_communicators_free_memory_and_work_again(num_ranks):
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    if num_ranks > 1 and not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("needs GPUs that reach each other by NVLink or PCIe")
    for found in run_ranks(num_ranks, leave_and_come_back, num_ranks, cuda=True):
        for away, freed, expected in found:
            assert away == [1, 1, 1]
            assert freed >= expected and bool(expected) == (num_ranks > 1)
