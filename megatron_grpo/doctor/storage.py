"""Checks of the speed, free space and locks of the run directory's file system."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.doctor.finding import Finding
from megatron_grpo.launch.mount import Mount

SECTION = "file system"
MIB = 2**20
MAX_BATCH_BYTES = 32 * MIB
SECONDS = 1.0
"""After this no further batch is written; the last one may take twice as long."""

SLOW = 100e6
"""Bytes per second below which a checkpoint of the smallest models takes minutes."""
FEW_BYTES_FREE = 20e9


@dataclass(frozen=True)
class Storage:
    """Properties of a file system, in bytes and bytes per second."""

    kind: str
    free: float
    written: float
    read: float
    local_locks: str = ""
    """The mount option that hides its locks from other hosts, if there is one."""


def measure_storage(folder: Path) -> Storage:
    """Write, sync and read back at most 63 MiB in `folder`, or in its nearest existing parent.

    Takes about 3 seconds at most and leaves no file. Raises OSError if nothing can be written.
    """
    folder = folder.resolve()
    while not folder.is_dir():
        folder = folder.parent
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor_", buffering=0) as file:
        written = _write(file.fileno())
        read = _read(file.fileno())
    mount = Mount.of(folder)
    free = shutil.disk_usage(folder).free
    return Storage(mount.kind, free, written, read, mount.local_locks)


def _write(file: int) -> float:
    """Speed of the last and largest batch, including fsync, where latency matters least."""
    size, start = MIB, time.perf_counter()
    while True:
        block = os.urandom(MIB)  # random, so that compressing file systems have no advantage
        begun = time.perf_counter()
        for _ in range(size // MIB):
            os.write(file, block)
        os.fsync(file)
        now = time.perf_counter()
        if now - start > SECONDS or size >= MAX_BATCH_BYTES:
            return size / (now - begun)
        size *= 2


def _read(file: int) -> float:
    """Speed of reading the file back, bypassing this host's page cache if the kernel drops it."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(file, 0, os.SEEK_SET)
    start, size = time.perf_counter(), 0
    while block := os.read(file, MIB):
        size += len(block)
        if time.perf_counter() - start > SECONDS:
            break
    return size / (time.perf_counter() - start)


def judge_storage(storage: Storage) -> Iterator[Finding]:
    """Findings on speed, space and locks; only a lack of locks keeps training from starting."""
    slow = min(storage.written, storage.read) < SLOW
    yield Finding(
        SECTION,
        "run directory",
        "warning" if slow else "ok",
        f"{storage.kind}: one file written at {storage.written / 1e6:,.0f} MB/s, "
        f"read at {storage.read / 1e6:,.0f} MB/s",
        "set train.run_dir to a faster file system" if slow else "",
    )
    full = storage.free < FEW_BYTES_FREE
    yield Finding(
        SECTION,
        "free space",
        "warning" if full else "ok",
        f"{storage.free / 1e9:,.0f} GB",
        "make room, or set train.run_dir; a bfloat16 checkpoint takes 14 bytes per parameter"
        if full
        else "",
    )
    if storage.local_locks:
        yield Finding(
            SECTION,
            "locks",
            "missing",
            f"mounted with {storage.local_locks}: other hosts do not see them",
            "mount it with -o flock (Lustre), or without nolock and local_lock (NFS); or set "
            "train.run_dir",
        )
