"""Products with quantised weights in a vLLM for CPUs, by torch, from weights as they were loaded.

vLLM's own kernels for CPUs pack the weights after loading, each in a form of its own, so that
weights that are pushed later would not fit, and some need instructions that many CPUs lack. These
are for trying a run out: GPUs have vLLM's kernels.
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
    """From now on, layers that vLLM builds multiply by the functions below."""
    kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [Fp8Blocks]
    # Where it knows no unit for products in FP8, as on a CPU, vLLM looks among the second.
    kernels._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU] = [Fp8Rows]
    kernels._POSSIBLE_WFP8A16_KERNELS[PlatformEnum.CPU] = [Fp8Rows]
    kernels._POSSIBLE_INT8_KERNELS[PlatformEnum.CPU] = [Int8Rows]


class _AsLoaded:
    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """On any CPU."""
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Weights stay as they are."""


class Fp8Blocks(_AsLoaded, CPUFp8BlockScaledMMKernel):
    """Weights with a scale per block; activations are not quantised, as in vLLM's own."""

    def apply_weights(
        self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None, **_: object
    ) -> Tensor:
        """See vLLM."""
        params = self._get_layer_params(layer)
        return product_of_blocks(
            x, params.weight, params.block_scale, self.weight_group_shape, bias
        )


class Fp8Rows(_AsLoaded, CPUFP8W8A8ScaledMMLinearKernel):
    """Weights [columns, rows] with a scale per row; each token is quantised as well."""

    def apply_weights(
        self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """See vLLM."""
        weight, scales, *_ = self._get_layer_params(layer)
        return product_of_rows(x, weight.t(), scales, bias)


class Int8Rows(_AsLoaded, CPUInt8ScaledMMLinearKernel):
    """Weights [rows, columns] with a scale per row; each token is quantised as well."""

    def apply_weights(
        self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """See vLLM."""
        weight, scales, *_ = self._get_layer_params(layer)
        return product_of_rows(x, weight, scales, bias)
