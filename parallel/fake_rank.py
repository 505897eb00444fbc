"""One process that stands for any rank of a job of any size, without its peers or its memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
    """Be `rank` of a job of `dims`: yields its groups, as `init_groups` makes them.

    Groups have the rank's place and size, and communicate nothing: who gathers objects gets its own
    from every rank. `setup_device` comes first, and no process group may exist.
    """
    dist.init_process_group("fake", rank=rank, world_size=dims.world_size)
    try:
        with _replaced(new_group=_fake_group, all_gather_object=_all_gather_object):
            yield init_groups(dims)
    finally:
        destroy_groups()
        dist.destroy_process_group()


@contextmanager
def without_memory() -> Iterator[None]:
    """Tensors made inside have shape and type and no values: they are on torch's meta device."""
    with _OnMeta():
        yield


@contextmanager
def _replaced(**functions: Callable[..., Any]) -> Iterator[None]:
    """Have `torch.distributed` hold other functions under these names."""
    originals = {name: getattr(dist, name) for name in functions}
    for name, function in functions.items():
        setattr(dist, name, function)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _fake_group(
    ranks: Sequence[int], timeout: Any = None, backend: Any = None, **options: Any
) -> Any:
    """A group that this rank is in; the thousands that it is not in would take as many ms."""
    if dist.get_rank() not in ranks:
        return dist.GroupMember.NON_GROUP_MEMBER
    return distributed_c10d.new_group(ranks, backend="fake")


def _all_gather_object(objects: list[Any], own: Any, group: Any = None) -> None:
    """What every rank has, as if all had the same."""
    objects[:] = [own] * len(objects)


class _OnMeta(TorchFunctionMode):
    """Make every tensor on the meta device, and call its types CUDA's.

    Modules of a large model call torch a hundred thousand times: no mode below this one is asked,
    neither that of `torch.device` nor the one by which a CPU stands for CUDA.
    """

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
        with torch._C.DisableTorchFunction():
            if func is Tensor.type and len(args) == 1 and not kwargs:
                # Megatron's optimizer sorts its parameters by this name.
                name: str = func(*args)
                return f"torch.cuda.{name.rpartition('.')[2]}"
            if "device" in kwargs or func in _device_constructors():
                kwargs = kwargs | {"device": "meta"}
            return func(*args, **kwargs)
