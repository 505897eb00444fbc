"""Checks of a host: limits of a process, the run directory's file system, and its environment."""

import os
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.doctor.finding import Finding
from megatron_grpo.launch.run_dir import Mount

LIMITS = "host"
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
    yield Finding(LIMITS, "CPUs", "ok", value)
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
    return Finding(LIMITS, name, "warning" if remedy else "ok", value, remedy)


def _size(limit: int) -> str:
    return "unlimited" if limit == UNLIMITED else f"{limit / 1e6:,.1f} MB"


STORAGE = "file system"
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
        STORAGE,
        "run directory",
        "warning" if slow else "ok",
        f"{storage.kind}: one file written at {storage.written / 1e6:,.0f} MB/s, "
        f"read at {storage.read / 1e6:,.0f} MB/s",
        "set train.run_dir to a faster file system" if slow else "",
    )
    full = storage.free < FEW_BYTES_FREE
    yield Finding(
        STORAGE,
        "free space",
        "warning" if full else "ok",
        f"{storage.free / 1e9:,.0f} GB",
        "make room, or set train.run_dir; a bfloat16 checkpoint takes 14 bytes per parameter"
        if full
        else "",
    )
    if storage.local_locks:
        yield Finding(
            STORAGE,
            "locks",
            "missing",
            f"mounted with {storage.local_locks}: other hosts do not see them",
            "mount it with -o flock (Lustre), or without nolock and local_lock (NFS); or set "
            "train.run_dir",
        )


ENVIRONMENT = "surroundings"

SETTINGS = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_CUMEM_",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "NVIDIA_TF32_OVERRIDE",
    "NVTE_",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_",
)
"""How the variables begin whose values are shown, except paths: the environment holds secrets."""

TF32 = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")

MARKS = {
    "run/.containerenv": "podman",
    ".dockerenv": "docker",
    ".singularity.d": "apptainer",
    "etc/enroot/environ": "enroot",
}
"""Files that container runtimes leave in the root of a container."""


def judge_surroundings(
    environ: Mapping[str, str], on_gpu: bool, root: Path = Path("/")
) -> Iterator[Finding]:
    """Findings on Slurm, the container and the variables in `SETTINGS`."""
    yield Finding(ENVIRONMENT, "Slurm", "ok", _slurm(environ))
    runtime = next((name for mark, name in MARKS.items() if (root / mark).exists()), "none seen")
    image = environ.get("NVIDIA_PYTORCH_VERSION")
    value = f"{runtime}, NVIDIA's PyTorch image {image}" if image else runtime
    yield Finding(ENVIRONMENT, "container", "ok", value)
    given = {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(SETTINGS) and not re.search(r"(^|[:=,])/", value)
    }
    remedies = [
        f"unset {name}: it rounds the factors of float32 products to 10 bits"
        for name in TF32
        if given.get(name) == "1"
    ]
    if given.get("CUDA_DEVICE_MAX_CONNECTIONS", "1") != "1":
        remedies.append(
            "unset CUDA_DEVICE_MAX_CONNECTIONS: Megatron's tensor parallelism requires 1"
        )
    yield Finding(
        ENVIRONMENT,
        "environment",
        "warning" if on_gpu and remedies else "ok",
        " ".join(f"{name}={value}" for name, value in given.items()) or "nothing set",
        "; ".join(remedies),
    )


def _slurm(environ: Mapping[str, str]) -> str:
    if "SLURM_JOB_ID" in environ:
        return f"in a job of {environ.get('SLURM_JOB_NUM_NODES', '1')} nodes"
    has_sbatch = shutil.which("sbatch", path=environ.get("PATH", os.defpath)) is not None
    return "a login node, or a shell outside of jobs" if has_sbatch else "none"
