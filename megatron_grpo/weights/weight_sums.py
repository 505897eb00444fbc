"""Checksums of what every worker of an engine must hold after a push, summed over the ranks."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_grpo.rollout import WorkerSums
from parallel import Layout


def sums_of_all_ranks(
    sent: Mapping[int, Mapping[str, int]], workers: Sequence[Layout]
) -> Sequence[WorkerSums]:
    """The checksums of each worker's parameters, from those of what each rank has `sent` to it.

    Padding is zero and adds nothing. Collective over all ranks of the default group: one all-reduce
    with an int64 for each parameter of each worker.
    """
    names = [(number, name) for number, worker in enumerate(workers) for name in worker.shapes]
    sums = torch.tensor(
        [sent.get(number, {}).get(name, 0) for number, name in names], dtype=torch.int64
    )
    dist.all_reduce(sums)
    totals: list[dict[str, int]] = [{} for _ in workers]
    for (number, name), total in zip(names, sums.tolist(), strict=True):
        totals[number][name] = total
    return totals
