"""Counts the matrix-product FLOPs that a block executes, including those of attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


@contextmanager
def counted_flops() -> Iterator[FlopCounterMode]:
    """Yield a counter of the block's FLOPs.

    torch's counter ignores the attention kernels of CPUs, so attention runs as plain matrix
    products here. It also ignores products that are added in place, which are counted here.
    """
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _added_product})
    with sdpa_kernel(SDPBackend.MATH), counter:
        yield counter


def _added_product(total: Any, a: tuple[int, int], b: tuple[int, int], **_: Any) -> int:
    """FLOPs of total += a b, from the shapes of a and b."""
    return 2 * a[0] * a[1] * b[1]
