"""Counts the matrix-product FLOPs that a block executes, including those of attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


@contextmanager
def counted_flops() -> Iterator[FlopCounterMode]:
    """The counter of the block.

    torch's counts nothing for the kernels of attention that a CPU has, so that attention is made of
    plain products here; nor for products that are added in place.
    """
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _added_product})
    with sdpa_kernel(SDPBackend.MATH), counter:
        yield counter


def _added_product(total: Any, a: tuple[int, int], b: tuple[int, int], **_: Any) -> int:
    """Of total += a b, from shapes."""
    return 2 * a[0] * a[1] * b[1]
