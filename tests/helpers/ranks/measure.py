"""Counters of a block: FLOPs of matrix products, largest tensor, waits for a GPU."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from pytest import MonkeyPatch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
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


# The largest tensor that an operation creates, for tests of memory.


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


# Places where the host would wait for a GPU, counted on a machine without one.

ROOT = Path(__file__).parents[3]
OURS = ("megatron_grpo", "parallel")
WAITING = {
    "_local_scalar_dense",  # the value of a tensor: item, int, float, bool
    "_unique2",
    "bincount",
    "equal",
    "isin",
    "lift_fresh",  # a tensor of Python's numbers, copied to the GPU at once
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
"""ATen operations with a result that the host reads, or a shape that depends on values."""
READS = (Tensor.tolist, Tensor.numpy, Tensor.cpu)


@contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """Yield the number of the block's waits by "operation in file:function"."""
    waits: Counter[str] = Counter()

    def count(operation: str) -> None:
        waits[f"{operation} in {_innermost(sys._getframe(2))}"] += 1

    with MonkeyPatch.context() as patch, _Operations(count), _Reads(count):
        patch.setattr(torch.cuda, "synchronize", lambda device=None: count("synchronize"))
        yield waits


def _innermost(frame: FrameType | None) -> str:
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        megatron_path = str(path).rpartition("/megatron/core/")
        if megatron_path[1]:
            return f"megatron/core/{megatron_path[2]}:{frame.f_code.co_name}"
        is_ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in OURS
        if is_ours and frame.f_code.co_name != "__torch_function__":  # of the CPU runtime
            return f"{path.relative_to(ROOT)}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


class _Operations(TorchDispatchMode):
    def __init__(self, count: Callable[[str], None]) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if _waits(function, args, kwargs or {}):
            self._count(function.overloadpacket.__name__)
        return function(*args, **kwargs or {})


def _waits(function: Any, args: Any, kwargs: Any) -> bool:
    name = function.overloadpacket.__name__
    if name == "repeat_interleave":
        return function._overloadname != "self_int" and kwargs.get("output_size") is None
    if name in ("index", "index_put", "index_put_"):
        is_fill = name != "index" and args[2].numel() == 1  # a masked fill needs no indices
        return not is_fill and any(i is not None and i.dtype == torch.bool for i in args[1])
    return name in WAITING


class _Reads(TorchFunctionMode):
    def __init__(self, count: Callable[[str], None]) -> None:
        super().__init__()
        self._count = count

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in READS:
            self._count(function.__name__)
        return function(*args, **kwargs or {})
