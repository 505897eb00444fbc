"""Processes of the user's code from inside: how they begin, and what ends with a call."""

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from megatron_grpo.user_code.supervisor import SCHEDULERS


def begin_worker() -> tuple[Connection, int]:
    """What `start_supervised` has given this process: a connection to the trainer, and megabytes.

    It has no more memory than that from here on, and heeds no signal of the scheduler.
    """
    for number in SCHEDULERS:
        # A handler, which programs that the user's code starts do not inherit.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SCHEDULERS)
    fd, megabytes = map(int, sys.argv[1:])
    # Heap, stacks of threads and other private memory, but no files that are mapped to be read.
    resource.setrlimit(resource.RLIMIT_DATA, (megabytes << 20,) * 2)
    return Connection(fd), megabytes


@contextmanager
def forks_end_here() -> Iterator[None]:
    """Run the user's code; of processes that it has forked none leaves the block: they have no say.

    Neither by what they return nor by what they raise.
    """
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != pid:
            os._exit(1)
