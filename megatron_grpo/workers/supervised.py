"""Starting and ending processes for user code, each below a supervisor."""

import os
import socket
import struct
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe

from megatron_grpo.workers import supervisor

LOAD_SECONDS = 60.0
"""Loading may take this long, or as long as a call if that is longer: imports may be slow."""
END_SECONDS = 10.0
"""A supervisor that takes longer to kill its descendants is killed itself."""


def start_supervised(
    module: str, memory_megabytes: int, send_seconds: float
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Run `python -m MODULE FD MEGABYTES` below a supervisor.

    Returns the supervisor and our end of the connection. The process is a fresh interpreter rather
    than a fork, without torch and the trainer's threads. Sends are limited as `limit_sends` says.
    """
    connection, theirs = Pipe()
    arguments = [os.getpid(), theirs.fileno(), memory_megabytes, module]
    process = subprocess.Popen(
        [sys.executable, supervisor.__file__, *map(str, arguments)],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C goes to the trainer alone, which then ends it
    )
    theirs.close()
    limit_sends(connection, send_seconds)
    return process, connection


def limit_sends(connection: Connection, seconds: float) -> None:
    """Let a send that makes no progress for `seconds` raise BlockingIOError.

    A message may be larger than what the kernel buffers while the other side does not read.
    """
    whole = int(seconds)
    timeval = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def load_seconds(timeout: float) -> float:
    """Seconds within which a worker must load code whose calls are limited to `timeout` seconds."""
    return max(LOAD_SECONDS, timeout)


def tell_to_end(process: subprocess.Popen[bytes]) -> None:
    """Tell a supervisor to end, with all its descendants."""
    process.send_signal(supervisor.END)


def wait_end(process: subprocess.Popen[bytes]) -> None:
    """After `tell_to_end`, return when the supervisor has ended; kill it if it takes too long."""
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
