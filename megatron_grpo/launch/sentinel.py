"""A second process of each rank, which kills a rank that hangs.

`python sentinel.py RANK THREAD DUMP_SECONDS KILL_SECONDS` reads a byte from stdin for each
heartbeat of the process RANK. DUMP_SECONDS after the last one it signals THREAD, on which
faulthandler writes all stacks without the GIL; KILL_SECONDS after it, it kills RANK, even if
stopped. Time in which the whole job is suspended does not count: the sentinel is suspended, too.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress

from megatron_grpo.launch.parent_death import state_of
from megatron_grpo.launch.process import PREEMPTION_SIGNALS
from parallel.clock import TICK, RunningClock

STDIN = 0
STOPPED = "T"
"""State of a stopped process (`state_of`)."""
DUMP = signal.SIGRTMIN + 1
"""Signal on which a rank writes its stacks. Sent to the heartbeat thread, which only waits: in
another thread it would interrupt a system call."""
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, *PREEMPTION_SIGNALS)
"""Signals of terminals and schedulers to all processes, on which only the rank acts. Stopping
signals are not blocked: `scontrol suspend` begins with SIGTSTP."""


class Sentinel:
    """The rank's handle of its sentinel; made by the thread that sends heartbeats."""

    def __init__(self, dump: float, kill: float) -> None:
        """Write stacks after `dump` seconds without a heartbeat, kill the rank after `kill`."""
        arguments = [os.getpid(), threading.get_native_id(), dump, kill]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a child inherits the mask
        try:
            self._process = subprocess.Popen(
                [sys.executable, __file__, *map(str, arguments)], stdin=subprocess.PIPE
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)

    def beat(self) -> None:
        with suppress(OSError):  # a full pipe, while the sentinel alone is stopped
            os.write(self._pipe.fileno(), b".")

    def close(self) -> None:
        """Close the pipe in a forked child, which must not keep it open."""
        self._pipe.close()

    def end(self) -> None:
        """End the sentinel."""
        self._pipe.close()
        # Closing may not suffice: a process forked during Popen keeps the pipe open.
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Watch the process that started this one, until it ends or closes the pipe."""
    rank, thread = map(int, sys.argv[1:3])
    dump, kill = map(float, sys.argv[3:])
    libc, clock, is_dumped = ctypes.CDLL(None), RunningClock(), False
    heard = now = clock.now()
    while os.getppid() == rank:
        left = heard + dump - now
        ready, _, _ = select.select([STDIN], [], [], min(TICK, left) if left > 0 else TICK)
        now = clock.now()
        if ready:
            if not os.read(STDIN, 4096):
                return
            heard, is_dumped = now, False
        elif now - heard >= kill:
            os.kill(rank, signal.SIGKILL)
            return
        # A stopped rank would write only once it continues, while its other threads run.
        elif now - heard >= dump and not is_dumped and state_of(rank) != STOPPED:
            is_dumped = True
            libc.tgkill(rank, thread, DUMP)


if __name__ == "__main__":
    main()
