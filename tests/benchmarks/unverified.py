"""Pushes without checksums, to tell from those with them what verification costs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo import weight_sync
from parallel.checksum import copy_and_sum
from parallel.transport import streams
from worker_engines import WorkerEngines, WorkerProcess


@contextmanager
def unverified(rank: int, engines: WorkerEngines) -> Iterator[None]:
    """In the block, boxes are copied at once and unsummed, and the ranks add nothing up.

    Collective over all ranks.
    """
    if rank == 0:
        engines.call(_sum, False)
    dist.barrier()
    with (
        patch.object(streams, "copy_and_sum", _copy),
        patch.object(weight_sync, "sums_of_all_ranks", lambda *arguments: None),
    ):
        yield
    if rank == 0:
        engines.call(_sum, True)
    dist.barrier()


def _sum(process: WorkerProcess, is_on: bool) -> None:
    function: Any = copy_and_sum if is_on else _copy
    streams.copy_and_sum = function


def _copy(source: Tensor, target: Tensor, *box_and_shape: Any) -> Tensor:
    target.copy_(source)
    return torch.zeros((), dtype=torch.int64)
