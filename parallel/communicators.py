"""NCCL's communicators of this process, whose buffers can leave the GPU while nobody communicates.

`ncclCommSuspend` of NCCL 2.29.7 copies what a communicator has for peers that it reaches by NVLink
or PCIe to the host, and frees it; `ncclCommResume` brings it back, at the same addresses. What it
has for the network and for NVLS stays on the GPU, and so do communicators of two ranks, which torch
makes for a send outside a batch and gives no access to.
"""

from typing import Any

import torch
from torch.distributed import ProcessGroup, distributed_c10d

from parallel.collectives import wait_for_all


class Communicators:
    """Those of all groups that this process is in. All ranks make the same calls together.

    Without CUDA there are none, and nothing moves.
    """

    def __init__(self) -> None:
        self._away: list[Any] | None = None

    def suspend(self) -> None:
        """Free their buffers on the GPU, when all work on it is done.

        Peers may still be at it when this returns. Until `resume`, nothing may communicate over
        NCCL, where a kernel would end with an illegal address, nor may a group be destroyed.
        """
        assert self._away is None, "they are away"
        wait_for_all()  # while NCCL waits for peers, torch lets no other thread run Python
        self._away = [nccl for group in created_groups() if (nccl := _initialized(group))]
        for communicator in self._away:
            communicator.suspend()

    def resume(self) -> None:
        """Bring back what is away; else return at once."""
        if self._away is None:
            return
        wait_for_all()
        for communicator in self._away:
            communicator.resume()
        self._away = None


def created_groups() -> list[ProcessGroup]:
    """The groups that this process is in, oldest first.

    NCCL suspends and resumes a communicator once all of its ranks have come to it. All ranks create
    groups in one order, so they never wait for each other in a circle.
    """
    return list(distributed_c10d._world.pg_map)


def _initialized(group: ProcessGroup) -> Any:
    """The group's NCCL backend, if it has communicated: torch makes communicators on first use."""
    if not torch.cuda.is_available():
        return None
    backend: Any = group._get_backend(torch.device("cuda"))
    return backend if backend.name() == "nccl" and backend._comm_ptr() else None
