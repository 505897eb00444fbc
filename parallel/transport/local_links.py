"""Links within one host: both ends share memory, and take turns by signals over a socket."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from parallel.transport.cuda_memory import CudaMemory
from parallel.transport.host_memory import HostMemory
from parallel.transport.links import NUM_SLOTS, finish_copies
from parallel.transport.wire import LinkError, Wire

UNMAP_SECONDS = 1.0
"""How long the owner of GPU memory waits on close for the other end to unmap it."""


class Memory(Protocol):
    """Memory that two processes share."""

    tensor: Tensor

    def close(self) -> None:
        """Release it."""


class _LocalEnd:
    def __init__(self, wire: Wire, memory: Memory) -> None:
        self._wire = wire
        self._memory = memory
        self._slots = memory.tensor.chunk(NUM_SLOTS)

    def abort(self) -> None:
        """See `Link`."""
        self._wire.abort()

    def close(self) -> None:
        """See `Link`."""
        self._slots = ()
        try:
            self._memory.close()
        finally:
            self._wire.close()

    def _end_turn(self) -> None:
        """Hand the current buffer over to the other end."""
        finish_copies(self._slots[0].device)
        self._wire.say()


class LocalOutgoing(_LocalEnd):
    """The sender's end; see `Outgoing`."""

    _handed_over = _taken = 0

    @classmethod
    def open(cls, wire: Wire, bucket_bytes: int, device: torch.device) -> "LocalOutgoing":
        """Allocate the link's memory, which this end owns, and share it with the receiver."""
        num_bytes = NUM_SLOTS * bucket_bytes
        memory = (
            HostMemory.allocate(num_bytes)
            if device.type == "cpu"
            else CudaMemory.allocate(num_bytes, device)
        )
        try:
            memory.send(wire)
        except BaseException as error:
            memory.close()
            if isinstance(error, OSError):
                raise wire.closed() from error
            raise
        return cls(wire, memory)

    def close(self) -> None:
        """See `Link`; the other end should unmap GPU memory before it is freed."""
        if self._slots and self._slots[0].is_cuda:
            self._wire.await_end(UNMAP_SECONDS)
        super().close()

    def next_buffer(self) -> Tensor:
        """See `Outgoing`."""
        self._await_taken(self._handed_over - NUM_SLOTS + 1)
        return self._slots[self._handed_over % NUM_SLOTS]

    def hand_over(self, num_bytes: int) -> None:
        """See `Outgoing`."""
        self._end_turn()
        self._handed_over += 1

    def flush(self) -> None:
        """See `Outgoing`."""
        self._await_taken(self._handed_over)

    def _await_taken(self, number: int) -> None:
        while self._taken < number:
            self._wire.hear()
            self._taken += 1


class LocalIncoming(_LocalEnd):
    """The receiver's end; see `Incoming`."""

    _arrived = 0

    @classmethod
    def open(cls, wire: Wire, bucket_bytes: int, device: torch.device) -> "LocalIncoming":
        """Receive the memory of a link that its sender opens."""
        num_bytes = NUM_SLOTS * bucket_bytes
        memory: Memory
        try:
            if device.type == "cpu":
                memory = HostMemory.receive(wire, num_bytes)
            else:
                memory = CudaMemory.receive(wire, num_bytes, device)
        except OSError as error:
            raise LinkError(f"{wire.peer} did not share its memory: {error}") from error
        return cls(wire, memory)

    def arrivals(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """See `Incoming`."""
        for num_bytes in sizes:
            self._wire.hear()
            yield self._slots[self._arrived % NUM_SLOTS][:num_bytes]
            self._end_turn()
            self._arrived += 1
