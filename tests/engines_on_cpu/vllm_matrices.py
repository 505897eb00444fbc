"""Products by torch with quantised weights for vLLM on CPUs, with weights in their loaded form.

vLLM's own kernels for CPUs pack weights after loading, each in its own form, so that pushed ones
would not fit, and some need instructions that many CPUs lack. GPUs have vLLM's kernels.
"""

import torch
from torch import Tensor
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.scaled_mm.cpu import (
    CPUFp8BlockScaledMMKernel,
    CPUFP8W8A8ScaledMMLinearKernel,
    CPUInt8ScaledMMLinearKernel,
)
from vllm.platforms import PlatformEnum

from engines_on_cpu.products import product_of_blocks, product_of_rows


def multiply_by_torch() -> None:
    """Let layers that vLLM builds multiply by the classes below."""
    kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [Fp8Blocks]
    # On hardware without FP8 products, such as a CPU, vLLM looks in the second table.
    kernels._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU] = [Fp8Rows]
    kernels._POSSIBLE_WFP8A16_KERNELS[PlatformEnum.CPU] = [Fp8Rows]
    kernels._POSSIBLE_INT8_KERNELS[PlatformEnum.CPU] = [Int8Rows]


class _AsLoaded:
    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """True: any CPU."""
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave the weights as they are."""


class Fp8Blocks(_AsLoaded, CPUFp8BlockScaledMMKernel):
    """Weights with a scale per block; activations are not quantised, as in vLLM's own kernel."""

    def apply_weights(
        self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None, **_: object
    ) -> Tensor:
        """See vLLM."""
        params = self._get_layer_params(layer)
        return product_of_blocks(
            x, params.weight, params.block_scale, self.weight_group_shape, bias
        )


class Fp8Rows(_AsLoaded, CPUFP8W8A8ScaledMMLinearKernel):
    """Weights [columns, rows] with a scale per row; each token is quantised, too."""

    def apply_weights(
        self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """See vLLM."""
        weight, scales, *_ = self._get_layer_params(layer)
        return product_of_rows(x, weight.t(), scales, bias)


class Int8Rows(_AsLoaded, CPUInt8ScaledMMLinearKernel):
    """Weights [rows, columns] with a scale per row; each token is quantised, too."""

    def apply_weights(
        self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """See vLLM."""
        weight, scales, *_ = self._get_layer_params(layer)
        return product_of_rows(x, weight, scales, bias)
