"""Whether layers are Transformer Engine's on this host, and whether it computes what it should."""

from importlib import import_module

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

HOPPER = 9
"""Major compute capability."""
RIGHT_GRADIENTS = (9, 18)
"""The first cuDNN whose backward of attention over packed sequences is right on Hopper.

Earlier ones read a workspace that nobody has set (NVIDIA/TransformerEngine issue 2186). With 9.14,
heads of 256 and Transformer Engine 2.20, a model's gradient had 0.54 of its norm on an H200, and
nothing said so; heads of 64, and of 192 with values of 128, were right there.
"""


def best_implementation(dtype: torch.dtype) -> str:
    """Megatron's `transformer_impl` for this host."""
    return "transformer_engine" if HAVE_TE and _can_be_fused(dtype) else "local"


def _can_be_fused(dtype: torch.dtype) -> bool:
    """Transformer Engine's attention over packed sequences supports only 16-bit types."""
    return torch.cuda.is_available() and dtype.itemsize == 2


def check_transformer_engine(dtype: torch.dtype, attention_backend: str | None) -> None:
    """Raise ValueError if layers can be fused here, but not with the packages that are installed.

    If Transformer Engine does not import, Megatron-Core takes torch's layers without a word of why.
    `attention_backend` is Megatron's; only with ``flash`` does cuDNN compute no attention.
    """
    if not _can_be_fused(dtype):
        return
    if HAVE_TE:
        if attention_backend != "flash":
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
        f"packed sequences on Hopper; {needed} is the first that does not. It takes the system's "
        "before that of torch: remove the system's, and put the folder nvidia/cudnn/lib of "
        "site-packages first in LD_LIBRARY_PATH; or choose torch's layers with "
        "model.megatron.transformer_impl=local"
    )
