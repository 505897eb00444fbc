"""Bytes from one GPU to another by the calls of NCCL itself, of the library that torch has loaded.

torch's own process group watches its communicators, and ends the process when the other end of one
is lost. Here that is a LinkError, and the process lives on.
"""

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from parallel.transport.cuda_driver import call_driver
from parallel.transport.wire import LinkError, Wire

MAX_CTAS = 4
"""Thread blocks of one transfer; those of many links are to fit on a GPU together."""
IN_PROGRESS, UINT8, UNDEFINED = 7, 1, -(1 << 31)  # as nccl.h has them
NON_BLOCKING = ctypes.c_uint(1)  # CU_STREAM_NON_BLOCKING: apart from CUDA's default stream
POLL_SECONDS = 0.0002


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_ubyte * 128),)


class _Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.17; newer ones take it by its size and version."""

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


class NcclCarrier:
    """Moves the bytes of CUDA tensors, while the wire tells whether the other end is there.

    A transfer is begun when both ends have said that they are ready for it, so what occupies a GPU
    never waits for long: its queue is its own, and no other transfer is before it there. Raises
    LinkError where the other end is lost.
    """

    def __init__(self, wire: Wire, device: torch.device, *, is_sender: bool) -> None:
        self._wire = wire
        self._device = device
        self._peer = ctypes.c_int(1 if is_sender else 0)
        self._comm = ctypes.c_void_p()
        self._stream: torch.cuda.Stream | None = None
        self._nccl = ctypes.CDLL("libnccl.so.2")
        unique_id = self._agree_on_id(is_sender)
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
        """Send all of `data`, uint8 [num_bytes]; it has gone when this returns."""
        self._wire.hear()
        self._wire.say()
        self._move("ncclSend", data)

    def receive(self, data: Tensor) -> None:
        """Fill all of `data`, uint8 [num_bytes]."""
        self._wire.say()
        self._wire.hear()
        self._move("ncclRecv", data)

    def close(self) -> None:
        """Move nothing more; ends a transfer whose other end is lost."""
        if self._comm:
            comm, self._comm = self._comm, ctypes.c_void_p()
            self._nccl.ncclCommAbort(comm)
        if self._stream:
            stream, self._stream = self._stream, None
            call_driver(self._device, "cuStreamDestroy_v2", ctypes.c_void_p(stream.cuda_stream))

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        """End a failed transfer at once: who waits for the GPU would wait for it, too."""
        try:
            yield
        except BaseException:
            self._wire.abort()  # what comes next fails before it needs the communicator
            self.close()
            raise

    def _agree_on_id(self, is_sender: bool) -> _UniqueId:
        unique_id = _UniqueId()
        if is_sender:
            self._check(self._nccl.ncclGetUniqueId(ctypes.byref(unique_id)))
            self._wire.send(memoryview(bytes(unique_id)))
        else:
            self._wire.receive(memoryview(unique_id).cast("B"))
        return unique_id

    def _move(self, name: str, data: Tensor) -> None:
        stream = self._stream
        if stream is None:
            raise self._wire.closed()
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
            done = torch.cuda.Event()
            done.record(stream)
            deadline = time.monotonic() + self._wire.seconds
            while not done.query():
                self._pause(deadline)

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function that may return before it is done, and wait until it is."""
        deadline = time.monotonic() + self._wire.seconds
        code = getattr(self._nccl, name)(*arguments)
        while code == IN_PROGRESS:
            self._pause(deadline)
            state = ctypes.c_int()
            self._check(self._nccl.ncclCommGetAsyncError(self._comm, ctypes.byref(state)))
            code = state.value
        self._check(code)

    def _pause(self, deadline: float) -> None:
        if not self._wire.is_open():
            raise self._wire.closed()
        if time.monotonic() > deadline:
            raise self._wire.mute()
        time.sleep(POLL_SECONDS)

    def _check(self, code: int) -> None:
        if code:
            self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
            said = self._nccl.ncclGetErrorString(ctypes.c_int(code)).decode()
            raise LinkError(f"NCCL to {self._wire.peer}: {said}")


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    """A queue that no other link is given.

    torch has 32 of its own and deals them out by turns: of two links of one pair of processes each
    end could then have the other one first, and both would wait for good.
    """
    stream = ctypes.c_void_p()
    call_driver(device, "cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
    return torch.cuda.ExternalStream(stream.value, device)
