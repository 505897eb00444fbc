"""GPU memory that two processes share, through the CUDA driver.

torch can share tensors, too, but counts references in a file that is left behind when a process is
killed, and shares everything else in the same block of its allocator.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from parallel.transport.cuda_driver import call_driver
from parallel.transport.wire import Wire


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
        self._address = address
        self._device = device
        self._free = free
        # Lets torch wrap memory that it does not own in a tensor.
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
    def receive(cls, wire: Wire, num_bytes: int, device: torch.device) -> "CudaMemory":
        """Map the memory that the other end of a wire shares."""
        address, handle = ctypes.c_uint64(), _Handle()
        wire.receive(memoryview(handle).cast("B"))
        call_driver(
            device, "cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, LAZY_PEER_ACCESS
        )
        return cls(address, num_bytes, device, "cuIpcCloseMemHandle")

    def send(self, wire: Wire) -> None:
        """Share the memory with the other end of a wire."""
        handle = _Handle()
        call_driver(self._device, "cuIpcGetMemHandle", ctypes.byref(handle), self._address)
        wire.send(memoryview(bytes(handle)))

    def close(self) -> None:
        """Free or unmap the memory."""
        del self.tensor
        torch.cuda.synchronize(self._device)  # wait for kernels that may still use it
        call_driver(self._device, self._free, self._address)
