"""Processes of the user's code, as the trainer starts and ends them: each below a supervisor."""

import os
import socket
import struct
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe

from megatron_grpo.user_code import supervisor

LOAD_SECONDS = 60.0
"""Loading may take this long, or as long as a call: imports are slow on a busy host."""
END_SECONDS = 10.0
"""A supervisor that takes longer to kill what is below it is itself killed."""


def start_supervised(
    module: str, memory_megabytes: int, send_seconds: float
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Run `python -m MODULE FD MEGABYTES` below a supervisor; that, and our end of the connection.

    A fresh interpreter rather than a fork: it holds neither torch nor the trainer's threads. A send
    that gets no further for `send_seconds` raises BlockingIOError: a message may be larger than
    what the kernel takes from us while the other side reads nothing.
    """
    connection, theirs = Pipe()
    arguments = [os.getpid(), theirs.fileno(), memory_megabytes, module]
    process = subprocess.Popen(
        [sys.executable, supervisor.__file__, *map(str, arguments)],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the trainer, which then ends it
    )
    theirs.close()
    whole = int(send_seconds)
    timeval = struct.pack("ll", whole, int((send_seconds - whole) * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
    return process, connection


def load_seconds(timeout: float) -> float:
    """How long a worker may take to load what is called with a limit of `timeout` seconds."""
    return max(LOAD_SECONDS, timeout)


def tell_to_end(process: subprocess.Popen[bytes]) -> None:
    """Have a supervisor end, with all that is below it."""
    process.send_signal(supervisor.END)


def wait_end(process: subprocess.Popen[bytes]) -> None:
    """Return when nothing of it is left, after `tell_to_end`."""
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
