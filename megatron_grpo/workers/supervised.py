"""A worker process for user code, below a supervisor: the trainer's side, and the worker's."""

import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from subprocess import DEVNULL
from typing import Any

from megatron_grpo.workers import supervisor
from megatron_grpo.workers.child_process import spawn
from megatron_grpo.workers.proxies import direct
from megatron_grpo.workers.user_file import MAX_TEXT, death_text, error_text, is_refusal
from parallel.clock import wait_for_end

LOAD_SECONDS = 60.0
"""Least time limit for loading user code: imports may be slow."""
END_SECONDS = 10.0
"""Time for a supervisor to kill its descendants; then it is killed itself."""


class SupervisedWorker:
    """`python -m MODULE FD MEGABYTES` below a supervisor, started at once.

    A fresh interpreter, without torch and the trainer's threads, which dies with this process and
    takes its descendants along. It receives pickles and answers in JSON: nothing from user code is
    unpickled.
    """

    def __init__(
        self, module: str, *, memory_megabytes: int, memory_key: str, send_seconds: float
    ) -> None:
        self._memory_limit = f"{memory_key} {memory_megabytes}"
        self.connection, theirs = Pipe()
        arguments = [os.getpid(), theirs.fileno(), memory_megabytes, module]
        self._supervisor = spawn(
            [sys.executable, supervisor.__file__, *map(str, arguments)],
            pass_fds=[theirs.fileno()],
            env=os.environ | direct(os.environ),  # for the clients that user code makes
            stdin=DEVNULL,
            start_new_session=True,  # Ctrl-C goes to the trainer alone, which then ends it
        )
        theirs.close()
        limit_sends(self.connection, send_seconds)

    @property
    def pid(self) -> int:
        """Process id of the supervisor, which ends after the worker and its descendants."""
        return self._supervisor.pid

    def receive_json(self) -> Any:
        """The next message; raises EOFError or ConnectionError if the worker is gone."""
        return json.loads(self.connection.recv_bytes())

    def cause_of_death(self, seconds: float) -> str:
        """Wait up to `seconds` for a worker that has closed its connection; describe its end."""
        wait_for_end(self._supervisor, seconds)  # it may live on without the connection
        return death_text(self._supervisor.returncode, self._memory_limit)

    def begin_kill(self) -> None:
        self._supervisor.send_signal(supervisor.END)

    def finish_kill(self) -> None:
        """Return when no process is left after `begin_kill`."""
        if wait_for_end(self._supervisor, END_SECONDS) is None:
            self._supervisor.kill()
            self._supervisor.wait()


def limit_sends(connection: Connection, seconds: float) -> None:
    """Make a send without progress for `seconds` raise BlockingIOError: a message may be larger
    than the kernel's buffer, and the other side may not read."""
    whole = int(seconds)
    timeval = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    # A duplicate shares the option, and can be closed without closing the connection.
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def load_seconds(timeout: float) -> float:
    """Seconds within which a worker must load code whose calls are limited to `timeout` seconds."""
    return max(LOAD_SECONDS, timeout)


def begin_worker() -> tuple[Connection, int]:
    """Connect a worker to the trainer, set its memory limit, and ignore the scheduler's signals.

    Returns the connection and the limit in megabytes.
    """
    for number in supervisor.SCHEDULERS:
        # A handler rather than SIG_IGN, which programs started by user code would inherit.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, supervisor.SCHEDULERS)
    fd, megabytes = map(int, sys.argv[1:])
    # Heap, thread stacks and other private memory, but not files mapped for reading.
    resource.setrlimit(resource.RLIMIT_DATA, (megabytes << 20,) * 2)
    return Connection(fd), megabytes


@contextmanager
def forks_end_here() -> Iterator[None]:
    """Run user code in the block; processes that it forks exit at the end of the block, and never
    run the worker's code."""
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != pid:
            os._exit(1)


def attempt(call: Callable[[], Any], limit: str) -> tuple[bool, Any]:
    """Call user code in a worker; returns (True, result) or (False, text of the failure)."""
    try:
        with forks_end_here():
            return True, call()
    except BaseException as error:  # sys.exit() in user code, too
        if is_refusal(error):
            return False, str(error)[-MAX_TEXT:]
        return False, error_text(error, limit)
