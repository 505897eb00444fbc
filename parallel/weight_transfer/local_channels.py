"""Channels within one host: both ends share memory, and take turns by signals over a socket.

Host memory is anonymous. GPU memory is shared through the CUDA driver, not through torch: that
counts references in a file that a killed process leaves behind, and shares everything else in the
same block of its allocator.
"""

import ctypes
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel.weight_transfer.channels import NUM_SLOTS, ChannelError, ControlSocket, finish_copies


class HostMemory:
    """Anonymous memory, used by the process that allocated it and by the one it was sent to.

    The host reclaims it when both have released it or ended. Pages are allocated at once, not on
    first write, so that the first push is as fast as later ones.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.tensor: Tensor = torch.from_file(
            f"/proc/self/fd/{descriptor}", shared=True, size=num_bytes, dtype=torch.uint8
        )
        """uint8 [num_bytes]"""
        self._descriptor = descriptor

    @classmethod
    def allocate(cls, num_bytes: int) -> "HostMemory":
        """Allocate new memory; call `send` exactly once."""
        descriptor = os.memfd_create("weights")
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            return cls(descriptor, num_bytes)
        except Exception as error:
            os.close(descriptor)
            if not isinstance(error, OSError):
                raise
            fault = f"cannot allocate {num_bytes:,} bytes of shared memory for weights"
            raise OSError(error.errno, f"{fault}: {error.strerror}") from error

    @classmethod
    def receive(cls, control: ControlSocket, num_bytes: int) -> "HostMemory":
        """Map the memory that the other end shares over `control`, a Unix socket."""
        _, descriptors, _, _ = socket.recv_fds(control.socket, 1, maxfds=1)
        if not descriptors:
            raise control.closed()
        try:
            return cls(descriptors[0], num_bytes)
        finally:
            os.close(descriptors[0])

    def send(self, control: ControlSocket) -> None:
        try:
            socket.send_fds(control.socket, [b"\0"], [self._descriptor])
        finally:
            os.close(self._descriptor)  # the mapping stays; file descriptors are scarce

    def close(self) -> None:
        """Release the memory; it stays mapped as long as tensors use it."""
        del self.tensor


def call_driver(device: torch.device, name: str, *arguments: Any) -> None:
    """Call a driver function in torch's context on `device`; RuntimeError if it fails."""
    driver = ctypes.CDLL("libcuda.so.1")
    with torch.cuda.device(device):
        # A thread has no CUDA context before its first runtime call; `query` is one without a wait.
        torch.cuda.current_stream().query()
        function: Callable[..., int] = getattr(driver, name)
        code = function(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        message = (text.value or b"unknown").decode()
        raise RuntimeError(f"{name}: {message} (CUDA driver error {code})")


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


LAZY_PEER_ACCESS = ctypes.c_uint(1)  # the only flag that the driver defines
BLOCK_BYTES = 2 << 20
"""The driver allocates memory from blocks of this size."""


class CudaMemory:
    """GPU memory, used by the process that allocated it and by the one it was sent to.

    It is freed when the process that allocated it closes it or ends.
    """

    def __init__(
        self, address: ctypes.c_uint64, num_bytes: int, device: torch.device, free: str
    ) -> None:
        self._address, self._device, self._free = address, device, free
        # With this, torch makes a tensor of memory that it does not own.
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address.value, False),
            "version": 3,
        }
        self.tensor: Tensor = torch.as_tensor(self, device=device)
        """uint8 [num_bytes]; not to be used after `close`."""

    @classmethod
    def allocate(cls, num_bytes: int, device: torch.device) -> "CudaMemory":
        """Allocate new memory; RuntimeError if the GPU has too little.

        The size is rounded up to whole driver blocks: sharing a part of a block shares all of it,
        including anything else that this process has there.
        """
        address = ctypes.c_uint64()
        size = ctypes.c_size_t(-(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES)
        call_driver(device, "cuMemAlloc_v2", ctypes.byref(address), size)
        return cls(address, num_bytes, device, "cuMemFree_v2")

    @classmethod
    def receive(cls, control: ControlSocket, num_bytes: int, device: torch.device) -> "CudaMemory":
        """Map the memory that the other end shares over `control`."""
        address, handle = ctypes.c_uint64(), _Handle()
        control.receive(memoryview(handle).cast("B"))
        call_driver(
            device, "cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, LAZY_PEER_ACCESS
        )
        return cls(address, num_bytes, device, "cuIpcCloseMemHandle")

    def send(self, control: ControlSocket) -> None:
        handle = _Handle()
        call_driver(self._device, "cuIpcGetMemHandle", ctypes.byref(handle), self._address)
        control.send(memoryview(bytes(handle)))

    def close(self) -> None:
        del self.tensor
        torch.cuda.synchronize(self._device)  # wait for kernels that may still use it
        call_driver(self._device, self._free, self._address)


def share_memory(
    control: ControlSocket, num_bytes: int, device: torch.device
) -> HostMemory | CudaMemory:
    """Allocate memory, owned by this process, and share it with the other end."""
    on_host = device.type == "cpu"
    memory = HostMemory.allocate(num_bytes) if on_host else CudaMemory.allocate(num_bytes, device)
    try:
        memory.send(control)
    except BaseException as error:
        memory.close()
        if isinstance(error, OSError):
            raise control.closed() from error
        raise
    return memory


def receive_memory(
    control: ControlSocket, num_bytes: int, device: torch.device
) -> HostMemory | CudaMemory:
    """Map the memory that the other end shares."""
    try:
        if device.type == "cpu":
            return HostMemory.receive(control, num_bytes)
        return CudaMemory.receive(control, num_bytes, device)
    except OSError as error:
        raise ChannelError(f"{control.peer} did not share its memory: {error}") from error


class LocalChannel:
    """A `Channel` in shared memory, owned by the sender."""

    def __init__(
        self, control: ControlSocket, bucket_bytes: int, device: torch.device, *, is_sender: bool
    ) -> None:
        open_memory = share_memory if is_sender else receive_memory
        self._control, self._is_sender = control, is_sender
        self._memory = open_memory(control, NUM_SLOTS * bucket_bytes, device)
        self._slots = self._memory.tensor.chunk(NUM_SLOTS)
        self._num_passed = self._num_taken = 0
        """Buckets that this end has passed on, and, at the sender, that the receiver has taken."""

    def next_buffer(self) -> Tensor:
        # The next bucket replaces the one NUM_SLOTS before it.
        self._await_taken(self._num_passed - NUM_SLOTS + 1)
        return self._slots[self._num_passed % NUM_SLOTS]

    def send_bucket(self, num_bytes: int) -> None:
        self._end_turn()

    def flush(self) -> None:
        self._await_taken(self._num_passed)

    def receive_buckets(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        for num_bytes in sizes:
            self._control.await_signal()
            yield self._slots[self._num_passed % NUM_SLOTS][:num_bytes]
            self._end_turn()

    def abort(self) -> None:
        self._control.abort()

    def close(self) -> None:
        # The receiver should unmap GPU memory before its sender frees it.
        if self._is_sender and self._slots and self._slots[0].is_cuda:
            self._control.await_end()
        self._slots = ()
        try:
            self._memory.close()
        finally:
            self._control.close()

    def _end_turn(self) -> None:
        """Pass the current buffer on to the other end: filled, or free to be filled again."""
        # Copies on a GPU are asynchronous: the other end would read or overwrite them too early.
        finish_copies(self._slots[0].device)
        self._control.send_signal()
        self._num_passed += 1

    def _await_taken(self, number: int) -> None:
        while self._num_taken < number:
            self._control.await_signal()
            self._num_taken += 1
