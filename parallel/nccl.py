"""NCCL, called directly in the library that torch loaded: Python's other threads run meanwhile.

Buffers of this process's communicators can leave the GPU while nobody communicates.
`ncclCommSuspend` of NCCL 2.29.7 copies buffers for peers behind NVLink or PCIe to the host, and
frees them; `ncclCommResume` brings them back, at the same addresses. Buffers for the network and
for NVLS stay on the GPU, and so do communicators of two ranks, which torch makes for sends outside
a batch and does not expose.

Both functions wait for peers without a time-out. torch's own `suspend` and `resume` hold the GIL
meanwhile: when a peer has failed, the watchdog's threads could neither say why nor end the rank.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch.distributed import DistBackendError, ProcessGroup, distributed_c10d


@cache
def library() -> ctypes.CDLL:
    """NCCL's functions; most return an ncclResult_t, which is 0 for success."""
    nccl = ctypes.CDLL("libnccl.so.2")
    nccl.ncclGetErrorString.restype = nccl.ncclGetLastError.restype = ctypes.c_char_p
    return nccl


def error_text(code: int) -> str:
    """NCCL's text for a result that is not 0, and for the last failure in this process."""
    kind: bytes = library().ncclGetErrorString(ctypes.c_int(code))
    last: bytes = library().ncclGetLastError(ctypes.c_void_p())
    return f"{kind.decode()}; last error: {last.decode()}"


SUSPEND_MEM = ctypes.c_int(1)  # from nccl.h


class Communicators:
    """NCCL communicators of all groups of this process. All ranks make the same calls together.

    Without CUDA there are none. Methods raise DistBackendError, after which the process must end.
    """

    def __init__(self) -> None:
        self.are_away = False

    def suspend(self) -> None:
        """Free the communicators' buffers on the GPU, when all work on it is done.

        Peers may still be suspending when this returns. Until `resume`, nothing may communicate
        over NCCL: a kernel would end with an illegal address.
        """
        assert not self.are_away
        self.are_away = True
        for communicator in _initialized():
            call_nccl("ncclCommSuspend", communicator, SUSPEND_MEM)

    def resume(self) -> None:
        """Bring suspended buffers back; without any, return at once."""
        if not self.are_away:
            return
        for communicator in _initialized():
            call_nccl("ncclCommResume", communicator)
        self.are_away = False


def call_nccl(name: str, *arguments: Any) -> None:
    """Call a function of NCCL; raises DistBackendError if it fails, here or at a peer."""
    if code := getattr(library(), name)(*arguments):
        raise DistBackendError(f"{name}: {error_text(code)}")


def created_groups() -> list[ProcessGroup]:
    """Process groups of this process, oldest first."""
    # NCCL suspends and resumes a communicator when all of its ranks have called it. All ranks
    # create groups in the same order; in this order they never wait for each other in a circle.
    return list(distributed_c10d._world.pg_map)


def _initialized() -> list[ctypes.c_void_p]:
    """Communicators of groups that have communicated: torch makes them at the first use.

    All ranks of a group agree on whether it has one, because each waits for all to make it. For
    other groups torch returns a null pointer.
    """
    if not torch.cuda.is_available():
        return []
    backends: list[Any] = [group._get_backend(torch.device("cuda")) for group in created_groups()]
    pointers = [backend._comm_ptr() for backend in backends if backend.name() == "nccl"]
    return [ctypes.c_void_p(pointer) for pointer in pointers if pointer]
