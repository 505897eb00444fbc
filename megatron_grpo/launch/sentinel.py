"""A process beside a rank that ends it when it neither runs nor ends.

`python sentinel.py RANK THREAD DUMP_SECONDS KILL_SECONDS` reads a byte from stdin for each
heartbeat of the process RANK. Without one for a while it asks the thread for all stacks, which
faulthandler writes without the GIL, and later kills the process, even if that is stopped. What
stops a whole job stops the sentinel too, so that this time does not count.
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
"""The state of a stopped process (`state_of`)."""
DUMP = signal.SIGRTMIN + 1
"""Makes a rank write its stacks. It goes to the heartbeat thread, which only waits: elsewhere it
would interrupt a call of the system."""
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, *PREEMPTION_SIGNALS)
"""Signals of terminals and schedulers to all processes, which only the rank acts on. Not what stops
them: `scontrol suspend` begins with SIGTSTP."""


class Sentinel:
    """The rank's end of it; made by the thread whose heartbeats count."""

    def __init__(self, dump: float, kill: float) -> None:
        """Without a heartbeat the rank's stacks come after `dump` seconds, its end after `kill`."""
        arguments = [os.getpid(), threading.get_native_id(), dump, kill]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # which a child inherits
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
        """End it, as nothing more is to be watched."""
        self._pipe.close()
        # A process that was forked while this one was made would keep the pipe open.
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
        # One that is stopped would write when it goes on, while its other threads run.
        elif now - heard >= dump and not is_dumped and state_of(rank) != STOPPED:
            is_dumped = True
            libc.tgkill(rank, thread, DUMP)


if __name__ == "__main__":
    main()
