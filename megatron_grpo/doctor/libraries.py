"""Transformer Engine and the CUDA libraries, as a rank loads them."""

import re
import subprocess
import sys
from collections.abc import Iterator

from megatron_grpo.doctor.finding import Finding
from megatron_grpo.doctor.packages import FOR_GPUS

SECTION = "GPUs"
LOAD = "import torch, transformer_engine.pytorch; print(open('/proc/self/maps').read())"


def judge_loaded() -> Iterator[Finding]:
    """Whether Transformer Engine imports, and whether a library is then loaded twice."""
    loaded = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True)
    if loaded.returncode:
        last = (loaded.stderr.splitlines() or [f"exit code {loaded.returncode}"])[-1]
        value = re.sub(r"\S*/", "", last)  # the names of files, without paths
        yield Finding(SECTION, "import of Transformer Engine", "missing", value, FOR_GPUS)
    else:
        yield Finding(SECTION, "import of Transformer Engine", "ok", "works")
        yield judge_folders(loaded.stdout)


def judge_folders(maps: str) -> Finding:
    """Whether each CUDA library comes from one folder; `maps` is a process's /proc/self/maps.

    Two cuDNNs in a process refuse each other's parts, or compute with different releases.
    """
    paths = re.findall(r"(/.*)/lib(cublas|cudnn|nccl)(?:Lt|(?<=cudnn)_\w+)?\.so", maps)
    folders = {name: {folder for folder, each in paths if each == name} for _, name in paths}
    twice = [name for name in sorted(folders) if len(folders[name]) > 1]
    if not twice:
        return Finding(SECTION, "CUDA libraries", "ok", "each loaded from one folder")
    found = "; ".join(", ".join(sorted(folders[name])) for name in twice)
    remedy = f"unload the site's module, or uninstall the system's: {found}"
    value = f"{', '.join(twice)} loaded from several folders"
    return Finding(SECTION, "CUDA libraries", "warning", value, remedy)
