"""The exact quantile of numbers that are distributed over ranks, without gathering them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

BITS = 8
"""Bits of each number per round; a round sums 256 counts over the ranks."""
DIGIT = (1 << BITS) - 1


def quantile(values: Tensor, q: float, all_reduce: Callable[[Tensor], None]) -> float:
    """The `q`-quantile of the float32 numbers of all ranks, interpolated like torch.quantile.

    Args:
        values: [n] finite numbers of this rank; n may be 0.
        q: 0 to 1.
        all_reduce: sums a tensor in place over the ranks.

    Returns:
        The quantile; -inf if no rank has a number.
    """
    keys = _ordered_bits(values.float())
    count = torch.tensor(len(keys), device=keys.device)
    all_reduce(count)
    if not count:
        return -math.inf
    position = q * (int(count) - 1)
    low = _smallest(keys, math.floor(position), all_reduce)
    fraction = position - math.floor(position)
    if not fraction:
        return low
    return low + fraction * (_smallest(keys, math.ceil(position), all_reduce) - low)


def _smallest(keys: Tensor, place: int, all_reduce: Callable[[Tensor], None]) -> float:
    """The number with `place` others before it, by a radix search from the highest digit."""
    prefix = 0
    for shift in range(32 - BITS, -1, -BITS):
        digits = (keys >> shift) & DIGIT
        if shift == 32 - BITS:  # the digit with the sign: negative numbers come first
            digits ^= (DIGIT + 1) // 2
        counts = torch.bincount(digits, minlength=DIGIT + 1)
        all_reduce(counts)
        up_to = counts.cumsum(0)
        digit = int(torch.searchsorted(up_to, place, right=True))
        place -= int(up_to[digit] - counts[digit])
        keys = keys[digits == digit]
        prefix = prefix << BITS | digit
    return _number(prefix - (1 << 31))


def _ordered_bits(values: Tensor) -> Tensor:
    """int32 numbers in the same order as the float32 `values`."""
    bits = values.view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _number(key: int) -> float:
    """The inverse of `_ordered_bits`, which is its own inverse on the bits."""
    bits = _ordered_bits(torch.tensor(key, dtype=torch.int32).view(torch.float32))
    return float(bits.view(torch.float32))
