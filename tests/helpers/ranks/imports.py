"""Modules that test ranks need, imported once in the process that the ranks are forked from.

That process starts in this repository and does not have pytest's `pythonpath`.
"""

import os
import sys
import tempfile
from pathlib import Path

# torch counts GPUs through CUDA unless it may use NVML, and a process forked after CUDA was
# initialised cannot use it.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

# A common folder of compiled GPU kernels; else each rank would compile all of them.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/kernels_of_tests")

import torch

from parallel.megatron_import import import_megatron

import_megatron()
sys.path[:0] = [str(Path(__file__).parents[2])]
for module in (
    *("megatron_grpo.trainer", "transformers", "datasets", "matplotlib.pyplot", "pytest"),
    *(
        f"helpers.{name}"
        for name in ("oracle.images", "oracle.mtp", "pushes.policies", "engines.live")
    ),
):
    __import__(module)

assert not torch.cuda.is_initialized(), (
    "CUDA was initialized by an import, perhaps of Transformer Engine beside flash-attn: uninstall "
    "flash-attn to run these tests"
)
