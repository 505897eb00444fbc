"""Products with quantised weights in a vLLM for CPUs, by torch, from weights as they were loaded.

vLLM's own kernels for CPUs pack the weights after loading, each in a form of its own, so that
weights that are pushed later would not fit, and some need instructions that many CPUs lack. These
are for trying a run out: GPUs have vLLM's kernels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.scaled_mm.cpu import (
    CPUFp8BlockScaledMMKernel,
    CPUFP8W8A8ScaledMMLinearKernel,
    CPUInt8ScaledMMLinearKernel,
)
from vllm.platforms import PlatformEnum

from checkpoint_convert.quantizer import block_maxima, dequantized, quantized


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


def product(
    x: Tensor, weight: Tensor, scales: Tensor | None, block: Sequence[int] | None
) -> Tensor:
    """A linear layer of a `weight` [rows, columns] with scales per `block`, row (None), or none."""
    if scales is None:
        return linear(x, weight)
    if block is None:
        return product_of_rows(x, weight, scales, None)
    return product_of_blocks(x, weight, scales, block, None)


def product_of_blocks(
    x: Tensor, weight: Tensor, scales: Tensor, block: Sequence[int], bias: Tensor | None
) -> Tensor:
    """A linear layer of an 8-bit `weight` [rows, columns] with scales per block."""
    rows, columns = block
    return linear(x, dequantized(weight, scales, (rows, columns), (0, 0)).to(x.dtype), bias)


_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""What the largest value of a token becomes. Weights have 127.5, where a one would not stay one:
from the product with the unit matrix vLLM makes weights for decode steps."""


def product_of_rows(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer of an 8-bit `weight` [rows, columns] with `scales` [rows, 1].

    Each token of `x` is quantised as a row is, by vLLM's scales.
    """
    tokens = x.reshape(-1, x.shape[-1])
    block = (1, x.shape[-1])
    maxima = block_maxima(tokens, block).float().clamp(min=torch.finfo(torch.float32).tiny)
    own = maxima / _LARGEST[weight.dtype]
    numbers = quantized(tokens, own, weight.dtype, block)
    values = linear(numbers.float(), weight.float()) * own * scales.view(1, -1)
    if bias is not None:
        values += bias
    return values.to(x.dtype).view(*x.shape[:-1], -1)
