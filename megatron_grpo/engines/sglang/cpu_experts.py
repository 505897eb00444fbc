"""Experts of an SGLang for CPUs whose workers share them, by torch.

SGLang's own takes an expert that another worker holds, which has the number -1, for an index.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.moe import fused_moe_native
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.topk import StandardTopKOutput
from torch import Tensor

of_all_experts: Callable[..., Tensor] = fused_moe_native.moe_forward_native


def skip_others() -> None:
    """From now on, layers that SGLang builds add nothing for experts of other workers."""
    fused_moe_native.moe_forward_native = of_own_experts


def of_own_experts(
    layer: Any, x: Tensor, topk_output: StandardTopKOutput, config: MoeRunnerConfig
) -> Tensor:
    """What the worker's experts add up to for tokens `x` [tokens, hidden].

    Every choice of one of these counts as a token of its own.
    """
    weights, ids, logits = topk_output
    if len(x) and (ids >= 0).all():
        return of_all_experts(layer, x, topk_output, config)
    summed = torch.zeros_like(x)
    tokens, choices = (ids >= 0).nonzero(as_tuple=True)
    if len(tokens):
        own = StandardTopKOutput(weights[tokens, choices, None], ids[tokens, choices, None], logits)
        summed.index_add_(0, tokens, of_all_experts(layer, x[tokens], own, config))
    return summed
