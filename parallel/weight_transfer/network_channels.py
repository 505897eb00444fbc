"""Channels between hosts, or between GPUs: each end has its own buffers.

Each end has a thread that transfers one buffer while the other buffer is filled or read.

Between GPUs, NCCL is called directly, in the library that torch loaded. torch's own process group
watches its communicators, and ends the process when a peer is lost. Here a lost peer raises
ChannelError, and the process continues.
"""

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from parallel.clock import running_time
from parallel.nccl import error_text, library
from parallel.weight_transfer.channels import NUM_SLOTS, ChannelError, ControlSocket, finish_copies
from parallel.weight_transfer.local_channels import call_driver

MAX_CTAS = 4
"""Maximum thread blocks of one transfer, so that transfers of many channels fit on a GPU."""
IN_PROGRESS, UINT8, UNDEFINED = 7, 1, -(1 << 31)  # from nccl.h
NON_BLOCKING = ctypes.c_uint(1)  # CU_STREAM_NON_BLOCKING: no sync with CUDA's default stream
POLL_SECONDS = 0.0002


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_ubyte * 128),)


class _Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.17; newer releases accept it, by its size and version."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
    )


class NcclTransport:
    """Moves the bytes of CUDA tensors, while the control socket detects the loss of the other end.

    A transfer starts after both ends have signalled that they are ready, in a stream of its own:
    its kernel never occupies a GPU for long while it waits for the peer. Raises ChannelError if the
    other end is lost.
    """

    def __init__(self, control: ControlSocket, device: torch.device, *, is_sender: bool) -> None:
        self._control, self._device = control, device
        self._peer = ctypes.c_int(1 if is_sender else 0)
        self._comm = ctypes.c_void_p()
        self._stream: torch.cuda.Stream | None = None
        self._nccl = library()
        unique_id = _UniqueId()
        if is_sender:
            self._check(self._nccl.ncclGetUniqueId(ctypes.byref(unique_id)))
            control.send(memoryview(bytes(unique_id)))
        else:
            control.receive(memoryview(unique_id).cast("B"))
        # blocking = 0: calls return at once, so that a lost peer cannot hang them (see `_call`).
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21700, 0, UNDEFINED, 1, MAX_CTAS, None)
        rank = ctypes.c_int(0 if is_sender else 1)
        with torch.cuda.device(device), self._aborting():
            self._stream = _new_stream(device)
            self._call(
                "ncclCommInitRankConfig",
                ctypes.byref(self._comm),
                ctypes.c_int(2),
                unique_id,
                rank,
                ctypes.byref(config),
            )

    def send(self, data: Tensor) -> None:
        """Send all of `data`, uint8 [num_bytes]; complete when this returns."""
        self._control.await_signal()
        self._control.send_signal()
        self._move("ncclSend", data)

    def receive(self, data: Tensor) -> None:
        """Fill all of `data`."""
        self._control.send_signal()
        self._control.await_signal()
        self._move("ncclRecv", data)

    def close(self) -> None:
        """Stop all transfers, even to a lost peer."""
        # The communicator first: its kernel may still run in the stream.
        if self._comm:
            comm, self._comm = self._comm, ctypes.c_void_p()
            self._nccl.ncclCommAbort(comm)
        if self._stream:
            stream, self._stream = self._stream, None
            call_driver(self._device, "cuStreamDestroy_v2", ctypes.c_void_p(stream.cuda_stream))

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        """End a failed transfer at once: any wait for the GPU would wait for it, too."""
        try:
            yield
        except BaseException:
            self._control.abort()  # later calls then fail before they need the communicator
            self.close()
            raise

    def _move(self, name: str, data: Tensor) -> None:
        stream = self._stream
        if stream is None:
            raise self._control.closed()
        with torch.cuda.device(self._device), self._aborting():
            self._call(
                name,
                ctypes.c_void_p(data.data_ptr()),
                ctypes.c_size_t(data.numel()),
                ctypes.c_int(UINT8),
                self._peer,
                self._comm,
                ctypes.c_void_p(stream.cuda_stream),
            )
            # Polled: `synchronize` would wait forever for a lost peer.
            done = torch.cuda.Event()
            done.record(stream)
            deadline = running_time() + self._control.seconds
            while not done.query():
                self._pause(deadline)

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a non-blocking function and wait until it is done."""
        deadline = running_time() + self._control.seconds
        code = getattr(self._nccl, name)(*arguments)
        while code == IN_PROGRESS:
            self._pause(deadline)
            state = ctypes.c_int()
            self._check(self._nccl.ncclCommGetAsyncError(self._comm, ctypes.byref(state)))
            code = state.value
        self._check(code)

    def _pause(self, deadline: float) -> None:
        if not self._control.is_open():
            raise self._control.closed()
        if running_time() > deadline:
            raise self._control.timed_out()
        time.sleep(POLL_SECONDS)

    def _check(self, code: int) -> None:
        if code:
            raise ChannelError(f"NCCL to {self._control.peer}: {error_text(code)}")


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that no other channel uses.

    torch hands out its pool of 32 streams in turn, so two channels between the same two processes
    could share one. If their transfers were then queued in opposite order at the two ends, both
    would wait forever.
    """
    stream = ctypes.c_void_p()
    call_driver(device, "cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
    return torch.cuda.ExternalStream(stream.value, device)


class TcpTransport:
    """Moves the bytes of CPU tensors over the control socket itself, as `NcclTransport` does."""

    def __init__(self, control: ControlSocket) -> None:
        self._control = control

    def send(self, data: Tensor) -> None:
        """Send all of `data`, uint8 [num_bytes]; the host may still hold some when this returns."""
        self._control.send(data.numpy().data)

    def receive(self, data: Tensor) -> None:
        self._control.receive(data.numpy().data)

    def close(self) -> None:
        """Nothing: the socket belongs to the channel."""


class NetworkChannel:
    """A `Channel` with buffers of its own at each end."""

    def __init__(
        self, control: ControlSocket, bucket_bytes: int, device: torch.device, *, is_sender: bool
    ) -> None:
        self._control = control
        self._transport: NcclTransport | TcpTransport = (
            TcpTransport(control)
            if device.type == "cpu"
            else NcclTransport(control, device, is_sender=is_sender)
        )
        try:
            self._slots = torch.empty(NUM_SLOTS, bucket_bytes, dtype=torch.uint8, device=device)
        except BaseException:
            self._transport.close()
            raise
        # A single thread: transfers keep their order, and the transport needs no lock.
        self._mover = ThreadPoolExecutor(max_workers=1)
        self._moving: deque[Future[None]] = deque()
        self._turn = 0
        """The buffer that the sender fills next."""

    def next_buffer(self) -> Tensor:
        # All buffers are on their way: wait for the oldest, which is the next in turn.
        if len(self._moving) == NUM_SLOTS:
            self._moving.popleft().result()
        return self._slots[self._turn]

    def send_bucket(self, num_bytes: int) -> None:
        finish_copies(self._slots.device)
        self._move(self._transport.send, self._slots[self._turn, :num_bytes])
        self._turn = (self._turn + 1) % NUM_SLOTS

    def flush(self) -> None:
        while self._moving:
            self._moving.popleft().result()
        # The receiver signals when it has read the last buffer.
        self._control.await_signal()

    def receive_buckets(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        buffers = [self._slots[number % NUM_SLOTS, :size] for number, size in enumerate(sizes)]
        # Both buffers receive ahead: one arrives while the other is read.
        for ahead in buffers[:NUM_SLOTS]:
            self._move(self._transport.receive, ahead)
        for number, buffer in enumerate(buffers):
            self._moving.popleft().result()
            yield buffer
            # The next transfer into this buffer must not overtake the reader's copies.
            finish_copies(buffer.device)
            for ahead in buffers[number + NUM_SLOTS : number + NUM_SLOTS + 1]:
                self._move(self._transport.receive, ahead)
        self._control.send_signal()

    def abort(self) -> None:
        self._control.abort()

    def close(self) -> None:
        # Aborted first: `shutdown` waits for a transfer, which may wait for a lost peer.
        self._control.abort()
        self._mover.shutdown()
        self._transport.close()
        self._control.close()
        self._moving.clear()
        del self._slots

    def _move(self, transfer: Callable[[Tensor], None], data: Tensor) -> None:
        self._moving.append(self._mover.submit(transfer, data))
