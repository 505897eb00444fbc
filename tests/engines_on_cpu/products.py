"""Products by torch with 8-bit weights in their loaded form, for engines on CPUs."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from checkpoint_convert.quantized.numbers import block_maxima, dequantized, quantized


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
"""The largest value of a token is scaled to this. Weights have 127.5, but then a 1 would not stay 1
in a product with the unit matrix, by which the weights of decode steps are computed."""


def product_of_rows(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer of an 8-bit `weight` [rows, columns] with `scales` [rows, 1].

    Each token of `x` is quantised like a row, with the scale maximum / `_LARGEST`.
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
