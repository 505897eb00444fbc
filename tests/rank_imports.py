"""What the ranks of tests import, once, in the process from which they are forked.

That process starts in this repository and knows nothing of pytest's `pythonpath`.
"""

import sys
from pathlib import Path

from parallel.megatron_import import import_megatron

import_megatron()
sys.path[:0] = [str(Path(__file__).parent)]
for module in (
    *("megatron_grpo.train", "transformers", "datasets", "matplotlib.pyplot", "pytest"),
    *("models", "policies", "pushes", "engines"),
):
    __import__(module)
