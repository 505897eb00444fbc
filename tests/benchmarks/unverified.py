"""Pushes without checksums, to tell from those with them what verification costs."""

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
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
    _library()
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
    _library()  # compiled before anything is measured
    function: Any = copy_and_sum if is_on else _copy
    streams.copy_and_sum = function


def _copy(source: Tensor, target: Tensor, *box_and_shape: Any) -> Tensor:
    """The copy of the kernel that also sums, without the sums; torch's where that has none."""
    same = source.dtype == target.dtype
    if same and target.dim() == 2 and source.stride(1) == target.stride(1) == 1:
        size = target.element_size()
        _library().copy_rows(
            ctypes.c_void_p(source.data_ptr()),
            ctypes.c_void_p(target.data_ptr()),
            ctypes.c_size_t(target.shape[0]),
            ctypes.c_size_t(target.shape[1] * size),
            ctypes.c_ssize_t(source.stride(0) * size),
            ctypes.c_ssize_t(target.stride(0) * size),
        )
    else:
        target.copy_(source)
    return torch.zeros((), dtype=torch.int64)


@cache
def _library() -> ctypes.CDLL:
    with TemporaryDirectory() as folder:
        library = Path(folder) / "copy_rows.so"
        source = Path(__file__).with_name("copy_rows.c")
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", library, source], check=True)
        return ctypes.CDLL(str(library))
