"""Links between hosts, or between GPUs: each end has its own buffers.

Each end has a thread that transfers one buffer while the other buffer is filled or read.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from parallel.transport.links import NUM_SLOTS, finish_copies
from parallel.transport.nccl import NcclCarrier
from parallel.transport.wire import Wire


class Carrier(Protocol):
    """Moves bytes between the two ends of a wire."""

    def send(self, data: Tensor) -> None:
        """Send all of `data`; complete when this returns."""

    def receive(self, data: Tensor) -> None:
        """Fill all of `data` with what the other end sends."""

    def close(self) -> None:
        """Stop all transfers."""


class TcpCarrier:
    """Moves the bytes of CPU tensors over the wire itself."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def send(self, data: Tensor) -> None:
        """See `Carrier`."""
        self._wire.send(data.numpy().data)

    def receive(self, data: Tensor) -> None:
        """See `Carrier`."""
        self._wire.receive(data.numpy().data)

    def close(self) -> None:
        """See `Carrier`."""


class _NetworkEnd:
    def __init__(
        self, wire: Wire, bucket_bytes: int, device: torch.device, *, is_sender: bool
    ) -> None:
        self._wire = wire
        self._carrier: Carrier = (
            TcpCarrier(wire)
            if device.type == "cpu"
            else NcclCarrier(wire, device, is_sender=is_sender)
        )
        try:
            self._slots = torch.empty(NUM_SLOTS, bucket_bytes, dtype=torch.uint8, device=device)
        except BaseException:
            self._carrier.close()
            raise
        self._mover = ThreadPoolExecutor(max_workers=1)
        self._moving: deque[Future[None]] = deque()

    def abort(self) -> None:
        """See `Link`."""
        self._wire.abort()

    def close(self) -> None:
        """See `Link`."""
        self._wire.abort()
        self._mover.shutdown()
        self._carrier.close()
        self._wire.close()
        self._moving.clear()
        del self._slots


class NetworkOutgoing(_NetworkEnd):
    """The sender's end; see `Outgoing`."""

    _turn = 0

    def __init__(self, wire: Wire, bucket_bytes: int, device: torch.device) -> None:
        super().__init__(wire, bucket_bytes, device, is_sender=True)

    def next_buffer(self) -> Tensor:
        """See `Outgoing`."""
        if len(self._moving) == NUM_SLOTS:
            self._moving.popleft().result()
        return self._slots[self._turn]

    def hand_over(self, num_bytes: int) -> None:
        """See `Outgoing`."""
        finish_copies(self._slots.device)
        data = self._slots[self._turn, :num_bytes]
        self._moving.append(self._mover.submit(self._carrier.send, data))
        self._turn = (self._turn + 1) % NUM_SLOTS

    def flush(self) -> None:
        """See `Outgoing`."""
        while self._moving:
            self._moving.popleft().result()
        self._wire.hear()


class NetworkIncoming(_NetworkEnd):
    """The receiver's end; see `Incoming`."""

    def __init__(self, wire: Wire, bucket_bytes: int, device: torch.device) -> None:
        super().__init__(wire, bucket_bytes, device, is_sender=False)

    def arrivals(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """See `Incoming`."""
        buffers = [self._slots[number % NUM_SLOTS, :size] for number, size in enumerate(sizes)]
        for ahead in buffers[:NUM_SLOTS]:
            self._expect(ahead)
        for number, buffer in enumerate(buffers):
            self._moving.popleft().result()
            yield buffer
            finish_copies(buffer.device)
            for ahead in buffers[number + NUM_SLOTS : number + NUM_SLOTS + 1]:
                self._expect(ahead)
        self._wire.say()

    def _expect(self, buffer: Tensor) -> None:
        self._moving.append(self._mover.submit(self._carrier.receive, buffer))
