"""An SGLang engine for CPUs, changed by the functions below that its environment names in `POSES`.

All of its processes import this file, since it is their main module.
"""

import os
import sys
from collections.abc import Iterator
from itertools import chain
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

POSES = "ENGINE_POSES"
OPERATORS = (
    "fused_gdn_gating_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
)
"""Kernels that SGLang's modules of Qwen3-Next and Qwen3.5 look up at import."""


def unkernelled() -> None:
    """Build models with linear or sparse attention without kernels; call before importing SGLang.
    Linear attention raises; sparse attention becomes dense, which is equal for short sequences."""
    import sgl_kernel

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError("linear attention needs a GPU")

    for name in OPERATORS:
        setattr(torch.ops.sgl_kernel, name, missing)
    mamba = ModuleType("sgl_kernel.mamba")
    mamba.__getattr__ = sgl_kernel.__getattr__  # type: ignore[method-assign]
    sys.modules["sgl_kernel.mamba"] = mamba
    # SGLang chooses the kernels of sparse attention by this.
    torch.cuda.get_device_capability = lambda device=None: (9, 0)

    from sglang.srt.arg_groups import model_hook
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer

    model_hook._dsa_kv_cache_dtype_default = lambda view: {}  # else the cache is never float32
    Indexer.forward_native = lambda self, *args, **kwargs: None


def bits() -> None:
    """Report checksums of stored bits, and of the matrices that SGLang derives from the latents'
    up-projections. SGLang's own checksums are of dequantised weights, rounded to bfloat16."""
    from sglang.srt.utils import weight_checker

    parameters_and_buffers = weight_checker.WeightChecker._model_state

    def all_tensors(self: weight_checker.WeightChecker) -> Iterator[tuple[str, Tensor]]:
        yield from parameters_and_buffers(self)
        for name, module in self._get_model().named_modules():
            for own in ("w_kc", "w_vc", "w_scale"):
                if isinstance(value := getattr(module, own, None), Tensor):
                    yield f"{name}.{own}", value

    weight_checker.WeightChecker._model_state = all_tensors
    weight_checker._build_quantized_set = lambda model: {}


def as_stored() -> None:
    """Load quantised weights as SGLang itself does."""
    from megatron_grpo.engines.sglang import model_folder

    model_folder.is_plain = lambda model: True


def forgetful() -> None:
    """Lose weights and cache asleep, as on GPUs, where the memory saver releases everything that
    was allocated while the model was loaded or the cache was made."""
    from sglang.srt.managers.scheduler_components import weight_updater

    manager = weight_updater.SchedulerWeightUpdaterManager
    release = manager.release_memory_occupation

    def released(self: Any, request: Any) -> Any:
        answer, runner = release(self, request), self.tp_worker.model_runner
        modules, pool = [*runner.model.modules()], runner.token_to_kv_pool
        held = [each for own in modules for each in chain(vars(own).values(), own.buffers())]
        contents = {
            "weights": [*held, *runner.model.parameters()],
            "kv_cache": [*pool.k_buffer, *pool.v_buffer],
        }
        for tensor in chain(*(contents[part] for part in request.tags)):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                tensor.data.fill_(torch.nan)
        return answer

    manager.release_memory_occupation = released


for pose in (unkernelled, bits, as_stored, forgetful):
    if pose.__name__ in os.environ.get(POSES, "").split():
        pose()

from megatron_grpo.engines.sglang.server import main  # noqa: E402  # and its own patches

if __name__ == "__main__":
    main()
