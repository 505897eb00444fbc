"""Memory that a machine has at hand when something is timed.

A virtual machine gives pages that it does not use back to its host, and where it wants them again
each waits for the host: `dd if=/dev/zero of=/dev/shm/x bs=1M count=12000` wrote 1.7 GB/s at first
and 0.21 GB/s behind 5 GB on the machine of docs/peers.md. That is no side's doing, and without this
the side that takes most memory would pay for it. All sides of a comparison have as much warmed,
which is what the greediest takes in all processes and files; /dev/shm must have room for it.
"""

from tempfile import NamedTemporaryFile

IN_MEMORY = "/dev/shm"
BLOCK = bytes(1 << 20)
"""Small: what the process itself takes may be watched."""


def warm_memory(num_bytes: int) -> None:
    """Use so many bytes that are free, and free them; in no process, so that no peak shows them."""
    with NamedTemporaryFile(dir=IN_MEMORY, prefix="warm-", buffering=0) as file:
        for _ in range(0, num_bytes, len(BLOCK)):
            file.write(BLOCK)
