"""Memory of a host that two processes share."""

import os
import socket

import torch
from torch import Tensor

from parallel.transport.wire import Wire


class HostMemory:
    """Memory without a name, used by the process that made it and by the one it was sent to.

    It goes back to the host when both have let go of it or ended. It is taken from the host when it
    is made, not when it is first written to, so the first push is no slower than those after it.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.tensor: Tensor = torch.from_file(
            f"/proc/self/fd/{descriptor}", shared=True, size=num_bytes, dtype=torch.uint8
        )
        """uint8 [num_bytes]"""
        self._descriptor = descriptor

    @classmethod
    def allocate(cls, num_bytes: int) -> "HostMemory":
        """New memory; `send` it once."""
        descriptor = os.memfd_create("weights")
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            return cls(descriptor, num_bytes)
        except Exception:
            os.close(descriptor)
            raise

    @classmethod
    def receive(cls, wire: Wire, num_bytes: int) -> "HostMemory":
        """The memory that the other end of a wire sends, which is a Unix socket."""
        _, descriptors, _, _ = socket.recv_fds(wire.socket, 1, maxfds=1)
        if not descriptors:
            raise wire.closed()
        try:
            return cls(descriptors[0], num_bytes)
        finally:
            os.close(descriptors[0])

    def send(self, wire: Wire) -> None:
        """Share the memory with the other end of a wire, which is a Unix socket."""
        try:
            socket.send_fds(wire.socket, [b"\0"], [self._descriptor])
        finally:
            os.close(self._descriptor)  # the mapping stays; links are many, and descriptors few

    def close(self) -> None:
        """Let go of the memory; it stays for as long as tensors are made from it."""
        del self.tensor
