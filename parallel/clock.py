"""The clock of all limits: seconds in which this process could run.

Slurm's gang scheduling, `scontrol suspend` and a freezer stop all processes of a job, and let them
go on minutes later. No limit may count that time. The kernel does not report a stop to the process,
so a thread reads the time every `TICK`, and a longer gap counts as at most `MOST`. Event loops of
`run` wait by this clock, and so do the time-outs of asyncio and aiohttp.
"""

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

TICK = 0.5
MOST = 2 * TICK
"""Most seconds that a gap between two readings counts: a busy machine may delay the thread."""


class RunningClock:
    """Seconds in which this process ran; its user calls `now` every `TICK` while waiting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = self._seen = time.monotonic()
        self._used = _main_thread_time()
        self.stopped = 0.0
        """Seconds that do not count."""

    def now(self) -> float:
        """Seconds since the clock was made, without stops."""
        with self._lock:
            seen, used = time.monotonic(), _main_thread_time()
            # While C code holds the GIL, no thread reads the clock: the gap counts as far as the
            # main thread used the CPU. Only that thread: 64 threads use 32 s in a `TICK`, which
            # would hide a stop of that length.
            ran = max(MOST, used - self._used)
            self.stopped += max(0.0, seen - self._seen - ran)
            self._seen, self._used = seen, used
            return seen - self._begun - self.stopped


def _main_thread_time() -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0))


class _TickingClock(RunningClock):
    """Running clock with a thread that calls `now`; a forked child starts a new one."""

    def __init__(self) -> None:
        super().__init__()
        self._starting, self.is_ticking = threading.Lock(), False
        os.register_at_fork(after_in_child=self._after_fork)

    def start(self) -> None:
        """Start the thread, unless another thread has."""
        with self._starting:
            if not self.is_ticking:
                self.now()
                threading.Thread(target=self._tick, name="clock", daemon=True).start()
                self.is_ticking = True

    def _tick(self) -> None:
        while True:
            time.sleep(TICK)
            self.now()

    def _after_fork(self) -> None:
        # A lock that another thread held at the fork would never be released in the child.
        self._lock, self._starting = threading.Lock(), threading.Lock()
        self.is_ticking = False
        self._used = _main_thread_time()  # the child's main thread is the one that forked


_CLOCK = _TickingClock()


def running_time() -> float:
    """Like `time.monotonic()`, but without the time in which this process was stopped."""
    if not _CLOCK.is_ticking:
        _CLOCK.start()
    return _CLOCK.now()


def stopped_time() -> float:
    """Seconds that `running_time` leaves out.

    A time-out that the kernel counted holds only if this has not grown during the wait.
    """
    running_time()
    return _CLOCK.stopped


class RunningLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers do not count the time in which this process was stopped."""

    def time(self) -> float:
        """Clock of `call_at` and `call_later`."""
        return running_time()


def run[T](coroutine: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, in a `RunningLoop`."""
    with asyncio.Runner(loop_factory=RunningLoop) as runner:
        return runner.run(coroutine)


def wait_for_end(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return code of `process` if it ends within `seconds`; else None."""
    deadline = running_time() + seconds
    # Short waits: the kernel would count the time of a stop in a single long one.
    while process.poll() is None and (left := deadline - running_time()) > 0:
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(left, TICK))
    return process.returncode


def result_within[T](future: Future[T], seconds: float) -> T:
    """The result of `future`; raises TimeoutError if it is not done within `seconds`."""
    deadline = running_time() + seconds
    while not future.done() and (left := deadline - running_time()) > 0:
        wait([future], min(left, TICK))
    return future.result(0)
