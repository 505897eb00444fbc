"""Activations wait in host memory for their backward: `fine_grained_activation_offloading`.

Megatron-Core's layers mark the modules whose saved tensors leave, and ask one manager per process
to move them. `Offloads` replaces Megatron's `PipelineOffloadManager`, which fits no packed
microbatches: its first schedule fixes the number of microbatches, moves nothing beyond it, and pins
memory for good for each shape of a tensor. Packed microbatches differ in number and length, and the
first schedule may have no gradients. In that schedule Megatron also reads the last tensors without
waiting for their copy (test_upstream: activation_offload).

`Offloads` lets autograd save a handle on a `Block` of memory, which knows where its bytes are.
Microbatches and stages may come in any order: only the time of the copy back depends on it.
"""

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def offload_activations(device: torch.device) -> None:
    """Let the layers of this process move activations of their `offload_modules` to the host."""
    # All of Megatron's offloading functions ask `PipelineOffloadManager.get_instance()`, which
    # makes its own manager only where OFFLOAD_MGR is None.
    if not isinstance(PipelineOffloadManager.OFFLOAD_MGR, Offloads):
        PipelineOffloadManager.OFFLOAD_MGR = Offloads(device)


class Block:
    """Bytes that autograd saved: a whole storage, or one tensor of a larger storage."""

    def __init__(self, values: Tensor) -> None:
        self.values: Tensor | None = values
        """Bytes [n] on the device; None while they are only on the host."""
        self._device = values.device
        self._arrived: Any = None
        # torch keeps freed pinned memory by its size, and reuses it only once copies are done.
        self.host = torch.empty(len(values), dtype=torch.uint8, pin_memory=values.is_cuda)
        self.host.copy_(values, non_blocking=True)

    def bring(self, streams: Any, arriving: Any) -> None:
        """Start to copy the bytes back on the stream `arriving`, unless they are on the device."""
        if self.values is not None:
            return
        # Queued work of the current stream may still use the memory that `empty` reuses; and only
        # the current stream has waited for the copy to the host (`Offloads.send`).
        self.values = torch.empty(len(self.host), dtype=torch.uint8, device=self._device)
        arriving.wait_stream(streams.current_stream())
        with streams.stream(arriving):
            self.values.copy_(self.host, non_blocking=True)
            self._arrived = streams.Event()
            self._arrived.record()

    def on_device(self, streams: Any, arriving: Any) -> Tensor:
        """Return the bytes; further work of the current stream waits for them."""
        self.bring(streams, arriving)
        assert self.values is not None
        if self._arrived is not None:
            self._arrived.wait()
            self._arrived = None
        return self.values


@dataclass(eq=False)
class Saved:
    """Stand-in that autograd keeps for a tensor."""

    held: Tensor | Block
    """The tensor itself, or the block with its bytes."""
    view: tuple[torch.dtype, Any, Sequence[int], Sequence[int]]
    """Dtype; offset, size and stride in the storage."""
    is_packed: bool = False
    """Whether the block holds this tensor alone, contiguously."""


@dataclass(eq=False)
class Group:
    """Tensors that one call of a module saved."""

    name: str
    """Megatron's name of the module: an entry of `offload_modules`."""
    saved: list[Saved] = field(default_factory=list)
    """Tensors still on the device."""
    blocks: list[Block] = field(default_factory=list)
    left: Any = None
    """The event after which all blocks are on the host."""


class Microbatch:
    """The groups of one forward of a model chunk; Megatron calls this a chunk handler."""

    def __init__(self, offloads: "Offloads", least: int) -> None:
        self._offloads, self._least = offloads, least
        self._open: dict[str, Group] = {}
        self.groups: list[Group] = []
        """Groups that have left, and whose backward is to come."""

    def on_group_start_forward(self, name: str) -> None:
        """Before a marked module."""
        self._offloads.group = self._open[name] = Group(name)

    def on_group_commit_forward(self, name: str, released: Sequence[Tensor]) -> None:
        """After a marked module: its tensors leave."""
        # Nothing to do for `released`: those tensors lose their last reference when the layer
        # returns.
        group = self._open.pop(name)
        self._offloads.send(group, self._least)
        self.groups.append(group)

    def on_group_commit_backward(self, name: str) -> None:
        """Before a module's backward: wait for its tensors, and start to copy the next ones.

        Backwards run in the reverse order of forwards.
        """
        group = self.groups.pop()
        assert group.name == name, f"backward of {name} before that of {group.name}"
        self._offloads.bring(group, awaits=True)
        if self.groups:
            self._offloads.bring(self.groups[-1], awaits=False)

    def on_group_start_backward(self) -> None:
        """After a module's backward: nothing to do, as autograd has dropped its handles."""


class Offloads:
    """Stands in for Megatron's ``PipelineOffloadManager``, with the same public methods.

    Tensors of the newest layer stay on the device; the computation waits until the layer before has
    left. So free memory does not depend on how far Python is ahead of the device, and the first
    backward finds its tensors there.
    """

    def __init__(self, device: torch.device) -> None:
        self.group: Group | None = None
        """Group of the module whose forward is running."""
        # torch.cpu has the streams and events of torch.cuda, where all work is done at once.
        # A rank without memory (`plan --instantiate`) computes nothing.
        self._streams: Any = torch.cpu if device.type == "meta" else torch.get_device_module(device)
        self._leaving, self._arriving = self._streams.Stream(), self._streams.Stream()
        self._newest: dict[str, Group] = {}
        self._microbatch: Microbatch | None = None
        self._weights: list[weakref.ref[Tensor]] = []
        self._addresses: set[int] | None = None
        self._hooks = saved_tensors_hooks(self._save, self._value)

    def init_model_chunk_offload_handler(
        self, _rank: int, _size: int | None, _stage: int | None, least: int, *_: Any, **__: Any
    ) -> None:
        """Before the forward of a model chunk: tensors of `least` elements or more will leave."""
        self._microbatch = Microbatch(self, least) if torch.is_grad_enabled() else None

    def mark_not_offload(self, tensor: Tensor) -> None:
        """Called by Megatron with each weight of a chunk, in the chunk's first forward."""
        self._weights.append(weakref.ref(tensor))
        self._addresses = None

    def pop_forward_chunk(self, name: str | None = None) -> Microbatch | None:
        """Return the microbatch of the forward that runs now."""
        return self._microbatch

    cur_forward_chunk = pop_forward_chunk

    def __enter__(self) -> None:
        if self._microbatch is not None:
            self._hooks.__enter__()

    def __exit__(self, *_: object) -> None:
        if self._microbatch is not None:
            self._hooks.__exit__()

    def reset(self) -> None:
        """After a schedule: drop the references to its tensors."""
        # torch gives freed memory to work of the stream that allocated it: copies to the host, on
        # another stream, must be done before.
        self._streams.current_stream().wait_stream(self._leaving)
        self._newest.clear()
        self.group, self._microbatch, self._addresses = None, None, None

    def send(self, group: Group, least: int) -> None:
        """Copy a group's tensors to the host, and free those of the layer before."""
        parts = _parts(group.saved, least)
        group.saved.clear()
        self._leaving.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._leaving):
            for values, saved in parts:
                block = self._block_of(values) or Block(values)
                group.blocks.append(block)
                for each in saved:
                    each.held = block
            group.left = self._streams.Event()
            group.left.record()
        before, self._newest[group.name] = self._newest.get(group.name), group
        if before is not None:
            before.left.wait()  # or later work would overwrite bytes that are still being copied
            for block in before.blocks:
                block.values = None

    def bring(self, group: Group, *, awaits: bool) -> None:
        """Start to copy a group's tensors back; `awaits`: the current stream waits for them.

        Free none of their memory before it has waited.
        """
        for block in group.blocks:
            block.bring(self._streams, self._arriving)
            if awaits:
                block.on_device(self._streams, self._arriving)

    def _block_of(self, values: Tensor) -> Block | None:
        """Find another module's block with the same bytes, such as its output."""
        blocks = (block for group in self._newest.values() for block in group.blocks)
        address = values.data_ptr(), len(values)
        for block in blocks:
            held = block.values
            if held is not None and (held.data_ptr(), len(held)) == address:
                return block
        return None

    def _save(self, tensor: Tensor) -> Tensor | Saved:
        """Replace a saved tensor by a `Saved`, unless it is a weight."""
        # Weights in FP8 are of Transformer Engine's own class, and have no storage.
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return tensor
        if self._addresses is None:
            weights = (reference() for reference in self._weights)
            self._addresses = {w.untyped_storage().data_ptr() for w in weights if w is not None}
        # By storage: a layer may save a view of its weight, such as a transposed one.
        if tensor.untyped_storage().data_ptr() in self._addresses:
            return tensor
        assert self.group is not None
        view = (tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())
        self.group.saved.append(saved := Saved(tensor, view))
        return saved

    def _value(self, saved: Tensor | Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if isinstance(saved.held, Tensor):
            return saved.held
        values = saved.held.on_device(self._streams, self._arriving)
        dtype, offset, size, stride = saved.view
        if saved.is_packed:  # the block is contiguous, but kernels may ask for the old stride
            strided = torch.empty_strided(size, stride, dtype=dtype, device=values.device)
            return strided.copy_(values.view(dtype).view(size))
        empty = torch.empty(0, dtype=dtype, device=values.device)
        return empty.set_(values.untyped_storage(), offset, size, stride)


def _parts(saved: Sequence[Saved], least: int) -> list[tuple[Tensor, list[Saved]]]:
    """Bytes [n] of each copy to the host, with the tensors in them.

    A storage leaves whole if its tensors cover at least half of it, such as queries, keys and
    values in one storage; otherwise each tensor is copied alone.
    """
    of_storage: dict[int, dict[Any, list[Saved]]] = defaultdict(lambda: defaultdict(list))
    for each in saved:
        of_storage[_tensor(each).untyped_storage().data_ptr()][each.view].append(each)
    parts: list[tuple[Tensor, list[Saved]]] = []
    for views in of_storage.values():
        tensors = [_tensor(same[0]) for same in views.values()]
        if sum(tensor.numel() for tensor in tensors) < max(least, 1):
            continue
        storage = tensors[0].untyped_storage()
        # An expanded tensor leaves with its storage: `_value` could not write to its own layout.
        repeats = any(0 in tensor.stride() for tensor in tensors)
        if repeats or 2 * sum(tensor.nbytes for tensor in tensors) >= storage.nbytes():
            whole = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
            whole.set_(storage, 0, (storage.nbytes(),), (1,))
            parts.append((whole, [each for same in views.values() for each in same]))
        else:
            parts += map(_contiguous, tensors, views.values())
    return parts


def _contiguous(tensor: Tensor, same: list[Saved]) -> tuple[Tensor, list[Saved]]:
    """A tensor's own bytes [n], contiguous."""
    for each in same:
        each.is_packed = True
    return tensor.contiguous().flatten().view(torch.uint8), same


def _tensor(saved: Saved) -> Tensor:
    assert isinstance(saved.held, Tensor), "still on the device"
    return saved.held
