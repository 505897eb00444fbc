"""Simulates any rank of a job of any size in one process, without its peers or its memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from parallel.dims import ParallelDims
from parallel.groups import Groups, destroy_groups, init_groups


@contextmanager
def fake_rank(dims: ParallelDims, rank: int) -> Iterator[Groups]:
    """Act as `rank` of a job of `dims`; yields its groups, as from `init_groups`.

    The groups have the correct ranks and sizes but do not communicate: gathering objects returns
    the rank's own object for every rank. Call `setup_device` first; no process group may exist.
    """
    dist.init_process_group("fake", rank=rank, world_size=dims.world_size)
    try:
        with patch.multiple(dist, new_group=_fake_group, all_gather_object=_all_gather_object):
            yield init_groups(dims)
    finally:
        destroy_groups()
        dist.destroy_process_group()


def _fake_group(
    ranks: Sequence[int], timeout: Any = None, backend: Any = None, **options: Any
) -> Any:
    """Creates only groups with this rank: thousands of other groups would take 1 ms each."""
    if dist.get_rank() not in ranks:
        return dist.GroupMember.NON_GROUP_MEMBER
    return distributed_c10d.new_group(ranks, backend="fake")


def _all_gather_object(objects: list[Any], own: Any, group: Any = None) -> None:
    """Fills `objects` as if every rank had the same object."""
    objects[:] = [own] * len(objects)


class WithoutMemory(TorchFunctionMode):
    """Create every tensor on the meta device, without values, and name tensor types as on CUDA."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        # Modules of a large model call torch a hundred thousand times. For speed, skip the modes
        # below this one: `torch.device`'s and `cpu_device`'s.
        with torch._C.DisableTorchFunction():
            if func is Tensor.type and len(args) == 1 and not kwargs:
                # Megatron's optimizer sorts its parameters by this name.
                name: str = func(*args)
                return f"torch.cuda.{name.rpartition('.')[2]}"
            if "device" in kwargs or func in _device_constructors():
                kwargs = kwargs | {"device": "meta"}
            return func(*args, **kwargs)
