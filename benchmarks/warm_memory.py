"""Makes a virtual machine hold free memory before something is timed.

A virtual machine returns unused pages to its host, and each page it needs again waits for the host:
`dd if=/dev/zero of=/dev/shm/x bs=1M count=12000` wrote 1.7 GB/s at first and 0.21 GB/s after 5 GB
on the machine of docs/peers.md. Without warming, the side that uses the most memory would pay for
this. All sides of a comparison warm the same amount: the memory of the largest side in all its
processes and files. /dev/shm must have room for it.
"""

from tempfile import NamedTemporaryFile

IN_MEMORY = "/dev/shm"
BLOCK = bytes(1 << 20)
"""Small, since the memory of this process may be measured."""


def warm_memory(num_bytes: int) -> None:
    """Use and free `num_bytes` of free memory; in a file, so that no process's peak counts them."""
    with NamedTemporaryFile(dir=IN_MEMORY, prefix="warm-", buffering=0) as file:
        for _ in range(0, num_bytes, len(BLOCK)):
            file.write(BLOCK)
