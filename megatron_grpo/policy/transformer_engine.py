"""Checks of Transformer Engine: whether this host's layers are its own, whether its gradients are
right, and whether its linear layers can multiply in FP8 (`model.megatron.fp8`)."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from checkpoint_convert import ModelShape
from megatron_grpo.config.megatron_fields import check_fp8_model
from megatron_grpo.policy.overrides import refuse_idle
from parallel import ParallelDims

HOPPER = 9
"""Major compute capability."""
RIGHT_GRADIENTS = (9, 18)
"""First cuDNN with a right backward of attention over packed sequences on Hopper.

Earlier releases read a workspace that nobody has set (NVIDIA/TransformerEngine issue 2186). With
9.14, heads of 256 and Transformer Engine 2.20, a model's gradient silently had 0.54 of its norm on
an H200; heads of 64, and of 192 with values of 128, were right.
"""
FP8_FIELDS = (
    "fp8_recipe",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
)
AVAILABLE = {
    "tensorwise": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}
"""Transformer Engine's functions that return whether a GPU has a recipe, and the reason if not."""
BLACKWELL = (10, 0)
"""Compute capability."""


def best_implementation(dtype: torch.dtype) -> str:
    """Megatron's `transformer_impl` for this host."""
    return "transformer_engine" if HAVE_TE and _can_be_fused(dtype) else "local"


def _can_be_fused(dtype: torch.dtype) -> bool:
    """Whether layers can be Transformer Engine's: on a GPU, in 16 bits."""
    # Its attention over packed sequences supports no other types.
    return torch.cuda.is_available() and dtype.itemsize == 2


def check_transformer_engine(dtype: torch.dtype, attention_backend: str | None) -> None:
    """Raise ValueError if the GPU allows Transformer Engine's layers and installed packages do not.

    `attention_backend`: Megatron's field.
    """
    # Where the package does not import, Megatron-Core silently takes torch's layers.
    if not _can_be_fused(dtype):
        return
    if HAVE_TE:
        if attention_backend != "flash":  # with any other, cuDNN may compute attention
            version = import_module("transformer_engine.pytorch.utils").get_cudnn_version()
            check_cudnn(torch.cuda.get_device_capability(), version)
        return
    reason = "Megatron-Core does not take this release"
    try:
        import_module("transformer_engine.pytorch.fp8")  # what Megatron-Core imports
    except ImportError as error:
        reason = str(error)
    raise ValueError(
        f"Transformer Engine does not work here ({reason}), and without it layers take several "
        "times as long: install it with `bash requirements/gpu.sh`, or choose torch's layers with "
        "model.megatron.transformer_impl=local"
    )


def check_cudnn(capability: tuple[int, int], version: tuple[int, int, int]) -> None:
    """Raise ValueError if this cuDNN computes wrong gradients on a GPU of this capability."""
    if capability[0] != HOPPER or version >= RIGHT_GRADIENTS:
        return
    found, needed = (".".join(map(str, each)) for each in (version, RIGHT_GRADIENTS))
    raise ValueError(
        f"cuDNN {found}, which Transformer Engine has found here, computes wrong gradients of "
        f"packed sequences on Hopper; {needed} is the first right one. Transformer Engine prefers "
        "the system's cuDNN to torch's: remove the system's, and put the folder nvidia/cudnn/lib "
        "of site-packages first in LD_LIBRARY_PATH; or choose torch's layers with "
        "model.megatron.transformer_impl=local"
    )


def check_fp8(
    settings: Mapping[str, Any],
    shape: ModelShape,
    dims: ParallelDims,
    dtype: torch.dtype,
    implementation: str,
) -> None:
    """Raise ValueError for fields of `fp8` that cannot work with this model or on this host."""
    fp8, recipe = settings.get("fp8"), settings.get("fp8_recipe")
    if not settings.get("first_last_layers_bf16"):
        at_ends = [name for name in settings if name.startswith("num_layers_at_")]
        refuse_idle(settings, at_ends, "first_last_layers_bf16=true")
    if fp8 is None:
        refuse_idle(settings, FP8_FIELDS, "fp8", "set that to e4m3 or hybrid")
        return
    prefix = f"model.megatron.fp8 {fp8}"
    check_fp8_model(settings, shape, dims)
    if implementation == "local" or dtype != torch.bfloat16:
        raise ValueError(
            f"{prefix} needs Transformer Engine's layers in bfloat16, but transformer_impl is "
            f"{implementation} and model.dtype {str(dtype).removeprefix('torch.')}: train on GPUs "
            "with Transformer Engine and model.dtype=bfloat16, or leave fp8 out"
        )
    if recipe is None:
        raise ValueError(
            f"{prefix} needs model.megatron.fp8_recipe: blockwise for Hopper, mxfp8 for Blackwell, "
            "or tensorwise"
        )
    library = import_module("transformer_engine.pytorch")
    is_there, reason = getattr(library, AVAILABLE[recipe])(return_reason=True)
    if recipe == "blockwise" and torch.cuda.get_device_capability() >= BLACKWELL:
        is_there, reason = False, "Blackwell only emulates it: use mxfp8"
    if not is_there:
        raise ValueError(f"model.megatron.fp8_recipe {recipe} is not for this GPU: {reason}")


def drop_quantized_weights(chunks: Sequence[torch.nn.Module]) -> None:
    """Free the FP8 copies of weights that layers keep from the first microbatch of a pass.

    Transformer Engine's layers quantise weights in the first microbatch for all others: up to two
    bytes per weight, which would stay while engines generate. A copy from a pass without gradients
    also lacks the transposed half, and its next update in blocks would not add it. The layer for
    multi-token prediction is not in `chunks`, as it is refused with FP8.
    """
    module: Any
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "_fp8_workspaces"):  # of Transformer Engine 2.9 to 2.20
                module._fp8_workspaces.clear()
