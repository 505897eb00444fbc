"""Products by torch for SGLang on CPUs: with 8-bit weights, and of experts split over workers.

SGLang packs 8-bit weights after loading, for kernels that no package has: pushed weights would not
fit. It also takes -1, the number of an expert on another worker, for an index. GPUs have SGLang's
kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.moe import fused_moe_native
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
from torch import Tensor

from checkpoint_convert.quantized.numbers import dequantized
from engines_on_cpu.products import product_of_blocks
from parallel import Shape

of_all_experts: Callable[..., Tensor] = fused_moe_native.moe_forward_native


def multiply_by_torch() -> None:
    """Let layers that SGLang builds multiply by the functions below.

    Activations are not quantised, as in SGLang's own kernels for CPUs.
    """
    for method in (Fp8LinearMethod, Fp8MoEMethod):
        method.process_weights_after_loading = lambda self, layer: None
    Fp8LinearMethod.apply = linear
    Fp8MoEMethod.apply = experts
    fused_moe_native.moe_forward_native = of_own_experts


def linear(self: Fp8LinearMethod, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """See SGLang."""
    scales = layer.weight_scale_inv
    return product_of_blocks(x, layer.weight, scales, self.weight_block_size, bias)


@dataclass(frozen=True)
class Dequantized:
    """Weights of experts [experts, rows, columns], each dequantised at its use."""

    numbers: Tensor
    scales: Tensor
    block: Shape
    dtype: torch.dtype

    def __getitem__(self, expert: int) -> Tensor:
        whole = dequantized(self.numbers[expert], self.scales[expert], self.block, (0, 0))
        return whole.to(self.dtype)


def experts(
    self: Fp8MoEMethod, layer: Any, dispatch_output: StandardDispatchOutput
) -> StandardCombineInput:
    """Outputs of experts, as SGLang computes them with 16-bit weights on a CPU."""
    x, block = dispatch_output.hidden_states, tuple(self.weight_block_size)
    both = Dequantized(layer.w13_weight, layer.w13_weight_scale_inv, block, x.dtype)
    down = Dequantized(layer.w2_weight, layer.w2_weight_scale_inv, block, x.dtype)
    weights = SimpleNamespace(num_experts=layer.num_experts, w13_weight=both, w2_weight=down)
    topk = dispatch_output.topk_output
    return StandardCombineInput(
        hidden_states=of_own_experts(weights, x, topk, self.moe_runner_config)
    )


def of_own_experts(
    layer: Any, x: Tensor, topk_output: StandardTopKOutput, config: MoeRunnerConfig
) -> Tensor:
    """Sum of the worker's experts for tokens `x` [tokens, hidden].

    Every choice of an expert of this worker is computed as a separate token.
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
