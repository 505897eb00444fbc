"""An SGLang engine for CPUs whose linear or sparse attention has no kernels: it loads weights,
takes pushes and tells checksums as in `sglang_bits`. It computes nothing with linear attention, and
with sparse attention lets all tokens see all before them, as they do in short sequences. All of its
processes import this file, as it is their main module.
"""

import sys
from types import ModuleType
from typing import NoReturn

import sgl_kernel
import torch

OPERATORS = (
    "fused_gdn_gating_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
)
"""What SGLang's files of Qwen3-Next and Qwen3.5 take from its kernels when they are imported."""


def missing(*args: object, **kwargs: object) -> NoReturn:
    raise NotImplementedError("linear attention needs a GPU")


for name in OPERATORS:
    setattr(torch.ops.sgl_kernel, name, missing)
mamba = ModuleType("sgl_kernel.mamba")
mamba.__getattr__ = sgl_kernel.__getattr__  # type: ignore[method-assign]
sys.modules["sgl_kernel.mamba"] = mamba
# Asked for where attention is sparse, to choose its kernels.
torch.cuda.get_device_capability = lambda device=None: (9, 0)

from sglang.srt.arg_groups import model_hook  # noqa: E402
from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer  # noqa: E402

from helpers.engines.sglang_bits import main  # noqa: E402

model_hook._dsa_kv_cache_dtype_default = lambda view: {}  # else none has 32 bits
Indexer.forward_native = lambda self, *args, **kwargs: None

if __name__ == "__main__":
    main()
