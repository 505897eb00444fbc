"""Experts of an SGLang for CPUs whose workers share them, by torch.

SGLang's own takes an expert that another worker holds, which has the number -1, for an index.
"""

from typing import Any

from sglang.srt.layers.moe import fused_moe_native
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.topk import StandardTopKOutput
from torch import Tensor

of_all_experts = fused_moe_native.moe_forward_native


def skip_others() -> None:
    """From now on, layers that SGLang builds add nothing for experts of other workers."""
    fused_moe_native.moe_forward_native = of_own_experts


def of_own_experts(
    layer: Any, x: Tensor, topk_output: StandardTopKOutput, config: MoeRunnerConfig
) -> Tensor:
    """What the worker's experts add up to: those of others count as its first, with weight 0."""
    weights, ids, logits = topk_output
    own = StandardTopKOutput(weights * (ids >= 0), ids.clamp_min(0), logits)
    summed: Tensor = of_all_experts(layer, x, own, config)
    return summed
