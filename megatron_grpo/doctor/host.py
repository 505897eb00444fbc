"""Checks of a host: limits of a process, file system of the run directory, network, environment."""

import ctypes
import os
import re
import resource
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_grpo.launch.run_dir import Mount
from parallel.words import counted


@dataclass(frozen=True)
class Check:
    """One line of the report. `value` holds no path, secret, or name of a user or host."""

    section: str
    name: str
    status: Literal["ok", "not needed", "warning", "missing"]
    """`missing`: training cannot start; `warning`: training is slower or less safe; `not needed`:
    not installed, and only some runs would use it."""
    value: str
    remedy: str = ""
    """Command that fixes a `warning` or `missing`."""

    @classmethod
    def warn_if(cls, is_bad: bool, section: str, name: str, value: str, remedy: str) -> "Check":
        """A warning with its remedy if `is_bad`, else `ok`."""
        if is_bad:
            return cls(section, name, "warning", value, remedy)
        return cls(section, name, "ok", value)

    @property
    def is_problem(self) -> bool:
        return self.status in ("warning", "missing")


def can_train(checks: Iterable[Check]) -> bool:
    """Whether nothing is missing that training needs."""
    return all(check.status != "missing" for check in checks)


UNLIMITED = resource.RLIM_INFINITY
MIN_SHARED_BYTES = 1e9
"""Need of vLLM's workers and NCCL in /dev/shm; containers have 64 MB by default."""
MIN_OPEN_FILES = 16384
"""Need of rank 0: a connection per completion of a generation, and about three per rank, for the
watchdog, torch's store (unless torchrun holds it) and gloo's gathers."""


@dataclass(frozen=True)
class Limits:
    """Limits of this process; sizes in bytes, UNLIMITED if there is no limit."""

    num_cpus: int
    memory: int
    shared: int
    locked: int
    num_files: int
    """Hard limit; runs raise their soft limit to it."""
    core: int


def read_limits() -> Limits:
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return Limits(
        num_cpus=len(os.sched_getaffinity(0)),
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        shared=shared.f_blocks * shared.f_frsize if shared else 0,
        locked=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        num_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        core=resource.getrlimit(resource.RLIMIT_CORE)[0],
    )


def check_limits(limits: Limits, on_gpu: bool) -> Iterator[Check]:
    """A check per limit. Locked memory matters for RDMA, which only GPU hosts use."""
    value = f"{limits.num_cpus} for this process, {limits.memory / 1e9:,.0f} GB of memory"
    yield Check("host", "CPUs", "ok", value)
    small, value = limits.shared < MIN_SHARED_BYTES, f"{limits.shared / 1e9:,.1f} GB"
    remedy = "mount -o remount,size=16G /dev/shm, or docker run --shm-size=16g"
    yield Check.warn_if(small, "host", "shared memory", value, remedy)
    limited, value = on_gpu and limits.locked != UNLIMITED, _size(limits.locked)
    remedy = (
        "ulimit -l unlimited, or memlock in /etc/security/limits.conf and in slurmd's unit: RDMA "
        "pins its buffers"
    )
    yield Check.warn_if(limited, "host", "ulimit -l (locked memory)", value, remedy)
    few = limits.num_files != UNLIMITED and limits.num_files < MIN_OPEN_FILES
    value = "unlimited" if limits.num_files == UNLIMITED else f"{limits.num_files:,}"
    remedy = f"ulimit -Hn {MIN_OPEN_FILES * 4}"
    yield Check.warn_if(few, "host", "ulimit -Hn (open files)", value, remedy)
    dumps, value = limits.core != 0, _size(limits.core)
    remedy = "ulimit -c 0: a rank that dies would first write all of its memory"
    yield Check.warn_if(dumps, "host", "ulimit -c (core dumps)", value, remedy)


def _size(limit: int) -> str:
    return "unlimited" if limit == UNLIMITED else f"{limit / 1e6:,.1f} MB"


MIB = 2**20
MAX_BATCH_BYTES = 32 * MIB
SECONDS = 1.0
"""No batch starts after this time; the last one may take twice as long."""
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
    """Mount option that hides locks from other hosts, if set."""


def measure_storage(folder: Path) -> Storage:
    """Write, sync and read back at most 63 MiB in `folder`, or in its nearest existing parent.

    Takes about 3 seconds at most and leaves no file. Raises OSError if nothing can be written.
    """
    folder = folder.resolve()
    while not folder.is_dir():
        folder = folder.parent
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor_", buffering=0) as file:
        written = _write_speed(file.fileno())
        read = _read_speed(file.fileno())
    mount = Mount.holding(folder)
    return Storage(mount.kind, shutil.disk_usage(folder).free, written, read, mount.local_locks)


def _write_speed(file: int) -> float:
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


def _read_speed(file: int) -> float:
    """Speed of reading the file back, bypassing this host's page cache if the kernel drops it."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(file, 0, os.SEEK_SET)
    start, size = time.perf_counter(), 0
    while block := os.read(file, MIB):
        size += len(block)
        if time.perf_counter() - start > SECONDS:
            break
    return size / (time.perf_counter() - start)


def check_storage(storage: Storage) -> Iterator[Check]:
    """Checks of speed, space and locks; only a lack of locks keeps training from starting."""
    section, slow = "file system", min(storage.written, storage.read) < SLOW
    value = f"{storage.kind}: one file written at {storage.written / 1e6:,.0f} MB/s"
    value += f", read at {storage.read / 1e6:,.0f} MB/s"
    remedy = "set train.run_dir to a faster file system"
    yield Check.warn_if(slow, section, "run directory", value, remedy)
    full, value = storage.free < FEW_BYTES_FREE, f"{storage.free / 1e9:,.0f} GB"
    remedy = "make room, or set train.run_dir; a bfloat16 checkpoint takes 14 bytes per parameter"
    yield Check.warn_if(full, section, "free space", value, remedy)
    if storage.local_locks:
        value = f"mounted with {storage.local_locks}: other hosts do not see them"
        remedy = (
            "mount it with -o flock (Lustre), or without nolock and local_lock (NFS); or set "
            "train.run_dir"
        )
        yield Check(section, "locks", "missing", value, remedy)


INSTALL_RDMA = "apt install rdma-core ibverbs-providers"


def check_network(on_gpu: bool, sys: Path = Path("/sys")) -> Iterator[Check]:
    """Checks of RDMA ports and interfaces (named as NCCL_SOCKET_IFNAME takes them)."""
    ports = _rdma_ports(sys)
    yield from check_rdma(
        ports, Path("/dev/infiniband").is_dir(), can_load("libibverbs.so.1"), on_gpu
    )
    value = ", ".join(_interfaces(sys)) or "only the loopback"
    yield Check("network", "interfaces", "ok", value)


def _rdma_ports(sys: Path) -> list[tuple[str, str, str]]:
    """State (`4: ACTIVE`), rate and link layer of every port of an InfiniBand or RoCE device."""
    ports = sorted((sys / "class" / "infiniband").glob("*/ports/*"))
    return [(_text(one / "state"), _text(one / "rate"), _text(one / "link_layer")) for one in ports]


def check_rdma(
    ports: Sequence[tuple[str, str, str]], verbs: bool, library: bool, on_gpu: bool
) -> Iterator[Check]:
    """A check per kind of port (state, rate, link layer).

    `verbs`: whether /dev/infiniband exists; `library`: whether libibverbs can be loaded.
    """
    if not ports:
        value = "none: hosts would communicate over TCP"
        yield Check.warn_if(on_gpu, "network", "RDMA", value, INSTALL_RDMA)
        return
    for (state, rate, link_layer), count in sorted(Counter(ports).items(), reverse=True):
        kind = "RoCE" if link_layer == "Ethernet" else link_layer
        value = f"{count} x {kind}, {rate}, {state.split(': ')[-1].lower()}"
        remedy = "ibstat; or leave the device out with NCCL_IB_HCA"
        is_down = not state.startswith("4:")
        yield Check.warn_if(is_down, "network", f"RDMA {kind}", value, remedy)
    if not verbs:
        value = "no /dev/infiniband: the ports cannot be used from here"
        remedy = f"mount /dev/infiniband into the container, or {INSTALL_RDMA}"
        yield Check("network", "RDMA verbs", "warning", value, remedy)
    if not library:
        value = "no libibverbs.so.1: NCCL would communicate over TCP"
        yield Check("network", "RDMA library", "warning", value, INSTALL_RDMA)


def can_load(library: str) -> bool:
    """Whether the dynamic linker finds a library: NCCL opens libibverbs in the same way."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _interfaces(sys: Path) -> Iterator[str]:
    """Name, speed and MTU of every network interface that is not the loopback and not down."""
    for folder in sorted((sys / "class" / "net").iterdir()):
        if folder.name == "lo" or not folder.is_dir() or _text(folder / "operstate") == "down":
            continue
        try:
            megabits = max(0, int(_text(folder / "speed")))
        except OSError:  # an unknown speed, for which some drivers say -1 instead
            megabits = 0
        speed = f"{megabits / 1000:g} Gb/s, " if megabits else ""
        yield f"{folder.name} ({speed}mtu {_text(folder / 'mtu')})"


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8").strip()


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
"""Prefixes of variables shown with their values, except paths: the environment holds secrets."""

TF32 = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")

CONTAINER_FILES = {
    "run/.containerenv": "podman",
    ".dockerenv": "docker",
    ".singularity.d": "apptainer",
    "etc/enroot/environ": "enroot",
}
"""Files in the root of a container, by runtime."""


def check_environment(
    environ: Mapping[str, str], on_gpu: bool, root: Path = Path("/")
) -> Iterator[Check]:
    """Checks of Slurm, the container and the variables in `SETTINGS`."""
    section = "environment"
    yield Check(section, "Slurm", "ok", _slurm(environ))
    runtimes = (name for file, name in CONTAINER_FILES.items() if (root / file).exists())
    runtime = next(runtimes, "none seen")
    image = environ.get("NVIDIA_PYTORCH_VERSION")
    value = f"{runtime}, NVIDIA's PyTorch image {image}" if image else runtime
    yield Check(section, "container", "ok", value)
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
    value = " ".join(f"{name}={value}" for name, value in given.items()) or "nothing set"
    is_bad = on_gpu and bool(remedies)
    yield Check.warn_if(is_bad, section, "environment", value, "; ".join(remedies))


def _slurm(environ: Mapping[str, str]) -> str:
    if "SLURM_JOB_ID" in environ:
        return f"in a job of {counted(int(environ.get('SLURM_JOB_NUM_NODES', '1')), 'node')}"
    has_sbatch = shutil.which("sbatch", path=environ.get("PATH", os.defpath)) is not None
    return "a login node, or a shell outside of jobs" if has_sbatch else "none"
