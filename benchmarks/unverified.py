"""Pushes without checksums, to measure what verification costs."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch.distributed as dist

from helpers.engines.vllm_workers import WorkerEngines, WorkerProcess
from megatron_grpo import weight_sync
from parallel.checksum import BoxCopy, NamedSum
from parallel.weight_transfer import streams, transfer

PATCHES = ExitStack()
"""Patches in a worker's process."""


@contextmanager
def unverified(rank: int, engines: WorkerEngines) -> Iterator[None]:
    """In the block, boxes are copied without being summed, and ranks do not reduce their sums.

    Collective over all ranks.
    """
    if rank == 0:
        engines.call(_sum, False)
    dist.barrier()
    with (
        patch.object(streams, "copied_and_summed", _copied),
        patch.object(weight_sync, "sums_of_all_ranks", lambda *arguments: None),
    ):
        yield
    if rank == 0:
        engines.call(_sum, True)
    dist.barrier()


def _sum(process: WorkerProcess, is_on: bool) -> None:
    if is_on:
        PATCHES.close()
    else:
        PATCHES.enter_context(patch.object(transfer, "checksums", lambda parameters: {}))


def _copied(copies: Iterable[BoxCopy]) -> list[NamedSum]:
    for copy in copies:
        copy.target.copy_(copy.source)
    return []
