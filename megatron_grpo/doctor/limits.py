"""Checks of the limits of a process: shared and locked memory, open files, core dumps."""

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.doctor.finding import Finding

SECTION = "host"
UNLIMITED = resource.RLIM_INFINITY

SHARED_BYTES = 1e9
"""Needed in /dev/shm, which vLLM's workers and NCCL use; containers have 64 MB by default."""
NUM_FILES = 16384
"""Rank 0 holds a connection for each completion of a generation, and about three to each rank: of
the watch, of torch's store (unless torchrun holds it) and of gloo, over which it gathers."""


@dataclass(frozen=True)
class Limits:
    """Limits of this process; sizes in bytes, UNLIMITED if there is no limit."""

    num_cpus: int
    memory: int
    shared: int
    locked: int
    num_files: int
    core: int


def read_limits(meminfo: Path = Path("/proc/meminfo"), shm: str = "/dev/shm") -> Limits:
    """The limits of this process."""
    total = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemTotal"))
    shared = os.statvfs(shm) if os.path.isdir(shm) else None
    return Limits(
        num_cpus=len(os.sched_getaffinity(0)),
        memory=int(total.split()[1]) * 1024,
        shared=shared.f_blocks * shared.f_frsize if shared else 0,
        locked=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        num_files=resource.getrlimit(resource.RLIMIT_NOFILE)[
            1
        ],  # the hard limit, to which runs raise theirs
        core=resource.getrlimit(resource.RLIMIT_CORE)[0],
    )


def judge_limits(limits: Limits, on_gpu: bool) -> Iterator[Finding]:
    """A finding per limit. Locked memory matters for RDMA, which only GPU hosts use."""
    value = f"{limits.num_cpus} for this process, {limits.memory / 1e9:,.0f} GB of memory"
    yield Finding(SECTION, "CPUs", "ok", value)
    yield _finding(
        "shared memory",
        f"{limits.shared / 1e9:,.1f} GB",
        ""
        if limits.shared >= SHARED_BYTES
        else "mount -o remount,size=16G /dev/shm, or docker run --shm-size=16g",
    )
    yield _finding(
        "ulimit -l (locked memory)",
        _size(limits.locked),
        "ulimit -l unlimited, or memlock in /etc/security/limits.conf and in slurmd's unit: RDMA "
        "pins its buffers"
        if on_gpu and limits.locked != UNLIMITED
        else "",
    )
    few = limits.num_files != UNLIMITED and limits.num_files < NUM_FILES
    count = "unlimited" if limits.num_files == UNLIMITED else f"{limits.num_files:,}"
    yield _finding("ulimit -Hn (open files)", count, f"ulimit -Hn {NUM_FILES * 4}" if few else "")
    yield _finding(
        "ulimit -c (core dumps)",
        _size(limits.core),
        "ulimit -c 0: a rank that dies would first write all of its memory" if limits.core else "",
    )


def _finding(name: str, value: str, remedy: str) -> Finding:
    return Finding(SECTION, name, "warning" if remedy else "ok", value, remedy)


def _size(limit: int) -> str:
    return "unlimited" if limit == UNLIMITED else f"{limit / 1e6:,.1f} MB"
