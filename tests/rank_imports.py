"""Modules that test ranks need, imported once in the process from which they are forked.

That process starts in this repository and knows nothing of pytest's `pythonpath`.
"""

import os
import sys
from pathlib import Path

# To ask for GPUs starts CUDA, unless torch may ask the driver's management library instead; and of
# a process that has started it none that uses it can be forked.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

from parallel.megatron_import import import_megatron

import_megatron()
sys.path[:0] = [str(Path(__file__).parent)]
for module in (
    *("megatron_grpo.rank", "transformers", "datasets", "matplotlib.pyplot", "pytest"),
    *("models", "policies", "pushes", "engines"),
):
    __import__(module)
