"""Host memory that two processes share."""

import os
import socket

import torch
from torch import Tensor

from parallel.transport.wire import Wire


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
        except Exception:
            os.close(descriptor)
            raise

    @classmethod
    def receive(cls, wire: Wire, num_bytes: int) -> "HostMemory":
        """Receive the memory that the other end of a wire, a Unix socket, shares."""
        _, descriptors, _, _ = socket.recv_fds(wire.socket, 1, maxfds=1)
        if not descriptors:
            raise wire.closed()
        try:
            return cls(descriptors[0], num_bytes)
        finally:
            os.close(descriptors[0])

    def send(self, wire: Wire) -> None:
        """Share the memory with the other end of a wire, a Unix socket."""
        try:
            socket.send_fds(wire.socket, [b"\0"], [self._descriptor])
        finally:
            os.close(self._descriptor)  # the mapping stays; file descriptors are scarce

    def close(self) -> None:
        """Release the memory; it stays mapped as long as tensors use it."""
        del self.tensor
