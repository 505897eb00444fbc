"""Host memory that a GPU copies to and from at the full rate of the bus."""

import weakref
from pathlib import Path

import torch
from torch import Tensor


def page_locked_bytes(num_bytes: int) -> Tensor:
    """Uninitialised bytes [n] on the host, page-locked if there is a GPU."""
    room = torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes and torch.cuda.is_available():
        # Not torch's pinned memory, which is rounded up to a power of two.
        runtime, address = torch.cuda.cudart(), room.data_ptr()
        torch.cuda.check_error(runtime.cudaHostRegister(address, num_bytes, 0))
        weakref.finalize(room, runtime.cudaHostUnregister, address)
    return room


def available_bytes() -> int:
    """Bytes of memory that processes of this host can still take without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
