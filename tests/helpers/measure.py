"""Counts the matrix-product FLOPs that a block executes, including those of attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
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


# Measures the largest tensor that an operation creates, for tests of memory.


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation returns, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **kwargs or {})
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                self.num_elements = max(self.num_elements, value.numel())
        return result
