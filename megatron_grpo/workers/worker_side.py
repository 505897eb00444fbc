"""The inside of processes for user code: how they begin, and what ends with a call."""

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from megatron_grpo.workers.supervisor import SCHEDULERS


def begin_worker() -> tuple[Connection, int]:
    """Return the connection to the trainer and the memory limit in megabytes, from `sys.argv`.

    Limits this process's memory to that, and makes it ignore the scheduler's signals.
    """
    for number in SCHEDULERS:
        # A handler rather than SIG_IGN, which programs started by user code would inherit.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SCHEDULERS)
    fd, megabytes = map(int, sys.argv[1:])
    # Heap, thread stacks and other private memory, but not files mapped for reading.
    resource.setrlimit(resource.RLIMIT_DATA, (megabytes << 20,) * 2)
    return Connection(fd), megabytes


@contextmanager
def forks_end_here() -> Iterator[None]:
    """Run user code in the block; processes that it forks exit at the end of the block.

    So they can neither return from it nor raise out of it.
    """
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != pid:
            os._exit(1)
