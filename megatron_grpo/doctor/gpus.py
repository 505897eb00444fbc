"""Checks of GPUs, their driver, and the CUDA libraries of torch."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.doctor.finding import Finding

SECTION = "GPUs"
LEAST_CAPABILITY = (8, 0)
"""The first compute capability with bfloat16."""


@dataclass(frozen=True)
class Gpu:
    """One GPU; memory in bytes."""

    name: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Gpus:
    """The driver, and what torch sees of it."""

    driver: str
    torch: str
    cuda: str | None
    """CUDA version that torch is built for; None for a CPU build."""
    nccl: str | None
    gpus: tuple[Gpu, ...]
    without_peer_access: tuple[tuple[int, int], ...]
    """Pairs (from, to) that cannot read each other's memory."""


def driver_version(proc: Path = Path("/proc"), dev: Path = Path("/dev")) -> str | None:
    """Version of NVIDIA's driver; "unknown" if only its device exists, None without a driver."""
    version = proc / "driver" / "nvidia" / "version"
    if version.exists():
        found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", version.read_text())
        return found[1] if found else "unknown"
    return "unknown" if (dev / "nvidiactl").exists() else None


def judge_gpus(found: Gpus | None) -> Iterator[Finding]:
    """Findings on the GPUs; None means no driver, so that training runs on CPUs."""
    if found is None:
        yield Finding(SECTION, "GPUs", "ok", "none: training runs on CPUs, over gloo")
        return
    if not found.gpus:
        yield _unseen(found)
        return
    for gpu, count in Counter(found.gpus).items():
        old = gpu.capability < LEAST_CAPABILITY
        value = f"{count} x {gpu.name}, {gpu.memory / 1e9:,.0f} GB, compute capability "
        value += "{}.{}".format(*gpu.capability)
        remedy = "model.dtype=float32: it has no bfloat16" if old else ""
        yield Finding(SECTION, "GPUs", "warning" if old else "ok", value, remedy)
    value = f"driver {found.driver}, CUDA {found.cuda} in torch, NCCL {found.nccl}"
    yield Finding(SECTION, "driver, CUDA and NCCL", "ok", value)
    yield _judge_peers(found)


def _unseen(found: Gpus) -> Finding:
    if found.cuda is None:
        value = f"torch {found.torch} is a build for CPUs"
        return Finding(
            SECTION, "GPUs", "missing", value, "use another environment: bash requirements/gpu.sh"
        )
    value = f"none seen by torch {found.torch} (CUDA {found.cuda}) through driver {found.driver}"
    remedy = "nvidia-smi; see CUDA_VISIBLE_DEVICES, --gres, and whether the driver is new enough"
    return Finding(SECTION, "GPUs", "missing", value, remedy)


def _judge_peers(found: Gpus) -> Finding:
    num_pairs = len(found.gpus) * (len(found.gpus) - 1)
    if not found.without_peer_access:
        value = "between all" if num_pairs else "only one GPU"
        return Finding(SECTION, "peer access", "ok", value)
    value = f"not between {len(found.without_peer_access)} of {num_pairs} pairs"
    return Finding(SECTION, "peer access", "warning", value, "nvidia-smi topo -p2p r")
