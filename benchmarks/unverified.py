"""Pushes without checksums, to measure what verification costs."""

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch.distributed as dist

from helpers.vllm_workers import WorkerEngines, WorkerProcess
from megatron_grpo import weight_sync
from parallel import checksum as cpu_checksum

SUMMING = cpu_checksum._add_pieces


@contextmanager
def unverified(rank: int, engines: WorkerEngines) -> Iterator[None]:
    """In the block, boxes are copied without being summed, and ranks do not reduce their sums.

    Collective over all ranks.
    """
    if rank == 0:
        engines.call(_sum, False)
    dist.barrier()
    with (
        patch.object(cpu_checksum, "_add_pieces", _copying()),
        patch.object(weight_sync, "sums_of_all_ranks", lambda *arguments: None),
    ):
        yield
    if rank == 0:
        engines.call(_sum, True)
    dist.barrier()


def _sum(process: WorkerProcess, is_on: bool) -> None:
    copying = _copying()  # compile before anything is measured
    cpu_checksum._add_pieces = SUMMING if is_on else copying


@cache
def _copying() -> Callable[..., None]:
    """The checksum kernel's `add_pieces` with copies only."""
    with TemporaryDirectory() as folder:
        library = Path(folder) / "copy_rows.so"
        source = Path(__file__).with_name("copy_rows.c")
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", library, source], check=True)
        copying = ctypes.CDLL(str(library)).add_pieces
        copying.argtypes, copying.restype = (ctypes.c_void_p, ctypes.c_size_t), None
        loaded: Callable[..., None] = copying
        return loaded
