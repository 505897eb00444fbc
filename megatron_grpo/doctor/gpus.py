"""Checks of GPUs, their driver, and the CUDA libraries of torch and Transformer Engine."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.doctor.host import Check
from megatron_grpo.doctor.packages import FOR_GPUS, installed_version

SECTION = "GPUs"
MIN_CAPABILITY = (8, 0)
"""The first compute capability with bfloat16."""
PACKED_CAPABILITY = (9, 0)
"""The first compute capability with attention over packed sequences in cuDNN, which Transformer
Engine calls."""
LOAD = "import torch, transformer_engine.pytorch; print(open('/proc/self/maps').read())"


@dataclass(frozen=True)
class Gpu:
    """One GPU; memory in bytes."""

    name: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Gpus:
    """The driver, and what torch sees through it."""

    driver: str
    torch: str = "not installed"
    cuda: str | None = None
    """CUDA version that torch is built for; None for a CPU build."""
    nccl: str | None = None
    gpus: tuple[Gpu, ...] = ()
    without_peer_access: tuple[tuple[int, int], ...] = ()
    """Pairs (from, to) that cannot read each other's memory."""


def find_gpus() -> Gpus | None:
    """The GPUs visible to this process; None without a driver. Imports torch where there is one."""
    driver = driver_version()
    if driver is None:
        return None
    if installed_version("torch") is None:  # reported by check_packages
        return Gpus(driver)
    import torch  # not above: it takes seconds, which a host without a driver need not wait

    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    return Gpus(
        driver=driver,
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if count else None,
        gpus=tuple(Gpu(one.name, one.total_memory, (one.major, one.minor)) for one in properties),
        without_peer_access=tuple(
            pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)
        ),
    )


def driver_version(proc: Path = Path("/proc"), dev: Path = Path("/dev")) -> str | None:
    """Version of NVIDIA's driver; "unknown" if only its device exists, None without a driver."""
    version = proc / "driver" / "nvidia" / "version"
    if version.exists():
        found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", version.read_text(encoding="utf-8"))
        return found[1] if found else "unknown"
    return "unknown" if (dev / "nvidiactl").exists() else None


def check_gpus(found: Gpus | None) -> Iterator[Check]:
    """Checks of the GPUs; None means no driver, so that training runs on CPUs."""
    if found is None:
        yield Check(SECTION, "GPUs", "ok", "none: training runs on CPUs, over gloo")
        return
    if not found.gpus:
        value = f"none seen by torch {found.torch} (CUDA {found.cuda}), driver {found.driver}"
        remedy = "nvidia-smi; see CUDA_VISIBLE_DEVICES, --gres, and whether the driver is too old"
        if found.cuda is None:
            value = f"torch {found.torch} is a build for CPUs"
            remedy = f"use another environment: {FOR_GPUS}"
        yield Check(SECTION, "GPUs", "missing", value, remedy)
        return
    for gpu, count in Counter(found.gpus).items():
        major, minor = gpu.capability
        value = f"{count} x {gpu.name}, {gpu.memory / 1e9:,.0f} GB"
        value += f", compute capability {major}.{minor}"
        remedy = ""
        if gpu.capability < MIN_CAPABILITY:
            remedy = "model.dtype=float32: this GPU has no bfloat16"
        elif gpu.capability < PACKED_CAPABILITY and installed_version("flash-attn") is None:
            remedy = (
                "pip install flash-attn, or model.megatron.transformer_impl=local: cuDNN has no "
                "attention over packed sequences on it"
            )
        yield Check.warn_if(bool(remedy), SECTION, "GPUs", value, remedy)
    value = f"driver {found.driver}, CUDA {found.cuda} in torch, NCCL {found.nccl}"
    yield Check(SECTION, "driver, CUDA and NCCL", "ok", value)
    num_pairs = len(found.gpus) * (len(found.gpus) - 1)
    value = "between all" if num_pairs else "only one GPU"
    if found.without_peer_access:
        value = f"not between {len(found.without_peer_access)} of {num_pairs} pairs"
    some_lack_it = bool(found.without_peer_access)
    yield Check.warn_if(some_lack_it, SECTION, "peer access", value, "nvidia-smi topo -p2p r")


def check_transformer_engine() -> Iterator[Check]:
    """Whether Transformer Engine imports, and whether a CUDA library is then loaded twice."""
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD], capture_output=True, text=True, encoding="utf-8"
    )
    if loaded.returncode:
        last = (loaded.stderr.splitlines() or [f"exit code {loaded.returncode}"])[-1]
        value = re.sub(r"\S*/", "", last)  # the names of files, without paths
        yield Check(SECTION, "import of Transformer Engine", "missing", value, FOR_GPUS)
    else:
        yield Check(SECTION, "import of Transformer Engine", "ok", "works")
        yield _check_library_folders(loaded.stdout)


def _check_library_folders(maps: str) -> Check:
    """Whether each CUDA library comes from one folder; `maps` is a process's /proc/self/maps.

    Two cuDNNs in a process refuse each other's parts, or compute with different releases.
    """
    # libcublasLt counts as cublas; libcudnn_ops, libcudnn_graph and others as cudnn.
    paths = re.findall(r"(/.*)/lib(cublas|cudnn|nccl)(?:Lt|(?<=cudnn)_\w+)?\.so", maps)
    folders = {name: {folder for folder, each in paths if each == name} for _, name in paths}
    twice = [name for name in sorted(folders) if len(folders[name]) > 1]
    if not twice:
        return Check(SECTION, "CUDA libraries", "ok", "each loaded from one folder")
    found = "; ".join(", ".join(sorted(folders[name])) for name in twice)
    remedy = f"unload the site's module, or uninstall the system's: {found}"
    value = f"{', '.join(twice)} loaded from several folders"
    return Check(SECTION, "CUDA libraries", "warning", value, remedy)
