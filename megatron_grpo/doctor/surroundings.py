"""The surroundings of this process: Slurm, a container, environment variables."""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_grpo.doctor.finding import Finding

SECTION = "surroundings"

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
    yield Finding(SECTION, "Slurm", "ok", _slurm(environ))
    runtime = next((name for mark, name in MARKS.items() if (root / mark).exists()), "none seen")
    image = environ.get("NVIDIA_PYTORCH_VERSION")
    value = f"{runtime}, NVIDIA's PyTorch image {image}" if image else runtime
    yield Finding(SECTION, "container", "ok", value)
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
        SECTION,
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
