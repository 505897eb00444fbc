"""Moves the training state to page-locked host memory while engines use the GPU: `train.offload`.

A part of the state is a list of storages. To leave, a storage is copied to the host and resized to
0 bytes; to come back, it is resized and filled. Tensors stay the same objects, so all views of the
storage (parameters, gradient buckets, shards, master weights) are valid again afterwards. While it
is away, torch cuts no new views from it.

Megatron-Core's own `offload_to_cpu` is not used. The optimizers' method makes new tensors in
pageable memory in every move, and separates float32 weights from the shards that are their master
weights; the gradient buffers' method knows neither frozen weights nor a reference, and needs CUDA
(test_upstream: residency).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage

from megatron_grpo.config.config import Config
from megatron_grpo.config.offload import (
    NOT_COPIED,
    PARTS,
    Offload,
    Part,
    Phase,
    communicates,
    parts_away,
    parts_moved,
    parts_used,
    smaller,
    words,
)
from megatron_grpo.policy.chunks import gather_weights
from megatron_grpo.policy.model import Policy
from megatron_grpo.policy.optimizer import state_tensors
from megatron_grpo.policy.optimizer_state import SplitFloats
from megatron_grpo.policy.reference import Reference
from parallel.alignment import round_up
from parallel.collectives import raise_first_failure, wait_for_all
from parallel.nccl import Communicators
from parallel.page_locked import available_bytes, page_locked_bytes
from parallel.words import counted

_ALIGNMENT = 64
"""Alignment in bytes of copies in host memory: a multiple of every element's size."""


@dataclass(frozen=True, eq=False)
class Room:
    """A storage of a part that moves."""

    part: Part
    values: Tensor
    """Bytes [n] of the whole storage, which has size 0 while it is away."""
    host: Tensor | None
    """Bytes [n] of host memory; None for a storage that is freed without a copy."""
    is_constant: bool = False
    """Whether no step changes it: one copy then serves all its moves."""


class Residency:
    """Moves the parts of one rank's state between GPU and host; all ranks make the same calls."""

    def __init__(
        self,
        offload: Offload,
        rooms: Sequence[Room],
        device: torch.device,
        communicators: Communicators | None = None,
        gather: Callable[[], None] = lambda: None,
    ) -> None:
        """`gather` makes weights whole: other ranks may have updated parts of them."""
        self.away: tuple[Part, ...] = ()
        """Parts that are not on the GPU."""
        self.rooms, self._offload = rooms, offload
        self._moves = bool(parts_moved(offload))
        self.communicators, self._gather = communicators, gather
        self._room_of = {room.values.untyped_storage(): room for room in rooms}
        # torch.cpu offers the same streams and events, which do nothing: its work is synchronous.
        self._streams: Any = torch.get_device_module(device)
        self._copying: Any = self._streams.Stream()
        self._arriving: dict[Part, Any] = {}
        self._copied: set[Room] = set()
        """Rooms with a current copy in host memory, complete or under way."""

    def enter(self, phase: Phase) -> None:
        """Move the parts to their places in `phase`.

        On return, every leaving part has left the GPUs of all ranks, and further work of the
        current stream finds the parts that `phase` uses. Other parts may still be on their way.
        """
        if not self._moves:
            return
        away = parts_away(self._offload, phase)
        if phase == "train":  # steps will change the other rooms: their copies are stale
            self._copied = {room for room in self._copied if room.is_constant}
        if leaving := [part for part in away if part not in self.away]:
            if "weights" in leaving:  # maybe right after a step, for an engine that starts
                self._gather()
            self._free(leaving)
            if self.communicators and not communicates(phase):
                self.communicators.suspend()
            # Engines may share the GPUs of several ranks: none may start before all have left.
            wait_for_all()
        if self.communicators and communicates(phase):
            self.communicators.resume()
        for part in PARTS:
            if part in self.away and part not in away:
                self._bring(part)
        self.away = away
        for part in parts_used(phase):
            self._await(part)

    def copy_ahead(self, phase: Phase) -> None:
        """Start to copy the parts that leave in `phase`; `enter(phase)` then waits less.

        Work of the current stream until then must not change these parts.
        """
        if not self._moves:
            return
        self._copying.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._copying):
            self._copy(parts_away(self._offload, phase))

    @overload
    def readable(self, tensor: Tensor) -> Tensor: ...

    @overload
    def readable(self, tensor: Tensor | SplitFloats) -> Tensor | SplitFloats: ...

    def readable(self, tensor: Tensor | SplitFloats) -> Tensor | SplitFloats:
        """Return `tensor`, or its values in host memory if the storage is away.

        Read-only, and valid until the next `enter`.
        """
        if isinstance(tensor, SplitFloats):
            return SplitFloats(self.readable(tensor.weights), self.readable(tensor.rest))
        room = self._room_of.get(tensor.untyped_storage())
        if room is None:
            return tensor
        if room.part not in self.away:
            self._await(room.part)
            return tensor
        assert room.host is not None, f"{room.part} have no values between steps"
        host = room.host.view(tensor.dtype)
        start = host.storage_offset() + tensor.storage_offset()
        return host.as_strided(tensor.shape, tensor.stride(), start)

    def _free(self, parts: Sequence[Part]) -> None:
        """Copy parts to the host where they have a place there, and free their GPU memory."""
        for part in parts:
            self._await(part)
        self._copy(parts)
        self._streams.synchronize()  # the copies are made, on both streams
        for room in self.rooms:
            if room.part in parts:
                room.values.untyped_storage().resize_(0)
        torch.cuda.empty_cache()  # engines are other processes: they need the driver's memory

    def _copy(self, parts: Sequence[Part]) -> None:
        """Start to copy parts to the host that have no current copy there."""
        for room in self.rooms:
            if room.part in parts and room not in self._copied and room.host is not None:
                room.host.copy_(room.values, non_blocking=True)
                self._copied.add(room)

    def _bring(self, part: Part) -> None:
        """Allocate the storages of a part, and start to fill them on the copying stream."""
        rooms = [room for room in self.rooms if room.part == part]
        for room in rooms:
            room.values.untyped_storage().resize_(room.values.numel())
        # Queued work of the current stream may still use the memory that `resize_` reuses.
        self._copying.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._copying):
            for room in rooms:
                if room.host is not None:
                    room.values.copy_(room.host, non_blocking=True)
            self._arriving[part] = self._streams.Event()
            self._arriving[part].record()

    def _await(self, part: Part) -> None:
        """Make further work of the current stream wait until a part has arrived."""
        if (arriving := self._arriving.pop(part, None)) is not None:
            arriving.wait()


EVERYTHING_STAYS = Residency("none", (), torch.device("cpu"))
"""The residency of state that never moves."""


def build_residency(
    cfg: Config,
    policy: Policy,
    reference: Reference | None,
    device: torch.device,
    num_ranks: int,
) -> Residency:
    """Build the residency of a rank's state on `device`, and lock its host memory.

    Raises ValueError on all ranks if a host with `num_ranks` ranks has too little memory.
    """
    offload = cfg.offload
    if not parts_moved(offload):
        return EVERYTHING_STAYS
    state = state_of(policy, reference)
    storages = _storages(state, parts_moved(offload), device)
    trained = {each.untyped_storage() for each in state["weights"] if each.requires_grad}
    sizes = [
        0 if part in NOT_COPIED else round_up(storage.nbytes(), _ALIGNMENT)
        for storage, part in storages.items()
    ]
    raise_first_failure(lambda: _check_host(offload, sum(sizes), num_ranks), ValueError)
    memory, rooms = page_locked_bytes(sum(sizes)), []
    for (storage, part), start in zip(storages.items(), accumulate(sizes, initial=0), strict=False):
        size = storage.nbytes()
        values = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,), (1,))
        host = None if part in NOT_COPIED else memory[start : start + size]
        constant = {"weights": storage not in trained, "reference": not cfg.grpo.sync_ref_model}
        rooms.append(Room(part, values, host, constant.get(part, False)))
    communicators = Communicators() if cfg.train.offload_communicators else None
    return Residency(offload, rooms, device, communicators, partial(gather_weights, policy.chunks))


def state_of(policy: Policy, reference: Reference | None) -> dict[Part, list[Tensor]]:
    """Tensors of each part of a rank's training state.

    Float32 weights are in two parts: the optimizer's master weights are views of them.
    """
    of_reference: list[Tensor] = []
    if reference is not None:
        of_reference += [*reference.parameters().values(), *reference.averaged_weights.values()]
    adapters = policy.adapters.parameters() if policy.adapters else {}
    return {
        "weights": [*policy.parameters().values(), *adapters.values()],
        "reference": of_reference,
        "gradients": [buffer.grad_data for buffer in gradient_buffers(policy)],
        "optimizer": state_tensors(chained_optimizers(policy)),
    }


def gradient_buffers(policy: Policy) -> list[Any]:
    """Megatron's buffers of gradients, also of the layer for multi-token prediction."""
    modules = [*policy.chunks, *([policy.mtp.module] if policy.mtp else ())]
    return [each for module in modules for each in module.buffers + module.expert_parallel_buffers]


def chained_optimizers(policy: Policy) -> list[Any]:
    """Optimizers that Megatron chains, also for the layer for multi-token prediction."""
    optimizers = [policy.optimizer, *([policy.mtp.optimizer] if policy.mtp else ())]
    chained = [part for optimizer in optimizers for part in optimizer.chained_optimizers]
    return [part for part in chained if part.optimizer is not None]  # None has no parameters


def _storages(
    state: Mapping[Part, Iterable[Tensor]], moved: Sequence[Part], device: torch.device
) -> dict[UntypedStorage, Part]:
    """Storages of the `moved` parts on `device`; a storage in two parts belongs to the first."""
    owner: dict[UntypedStorage, Part] = {}
    for part in PARTS:
        for tensor in state[part]:
            if tensor.device == device:
                owner.setdefault(tensor.untyped_storage(), part)
    return {storage: part for storage, part in owner.items() if part in moved}


def _check_host(offload: Offload, num_bytes: int, num_ranks: int) -> None:
    """Raise ValueError if this host lacks memory for its ranks; collective up to the error."""
    most = torch.tensor(num_bytes)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    needed, available = num_ranks * int(most), available_bytes()
    if needed > available:
        raise ValueError(
            f"train.offload {words(offload)} needs {needed / 1e9:.1f} GB of host memory for the "
            f"state of {counted(num_ranks, 'rank')}, and {available / 1e9:.1f} GB are available: "
            f"set train.offload to {' or '.join(smaller(offload))}, or use more hosts"
        )
