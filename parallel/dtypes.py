"""Dtypes in which this machine computes fastest for a model of a given dtype."""

from functools import cache

import torch


def attention_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which to compute torch's attention for a model of `dtype`.

    float32 on the CPU, where the backward in bfloat16 takes three times as long for sequences of
    tens of tokens, and equally long for hundreds.
    """
    return dtype if torch.cuda.is_available() else torch.promote_types(dtype, torch.float32)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which to multiply large matrices for a model of `dtype`.

    float32 on a CPU that emulates bfloat16: products take a seventh of the time, and are not
    rounded.
    """
    if torch.cuda.is_available() or _multiplies_bfloat16():
        return dtype
    return torch.promote_types(dtype, torch.float32)


@cache
def _multiplies_bfloat16() -> bool:
    known = torch.cpu.get_capabilities()
    has_instructions = any(known.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    # False also where ONEDNN_MAX_CPU_ISA keeps oneDNN, which multiplies for torch, from using them.
    return has_instructions and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
