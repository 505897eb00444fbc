"""The clock of all limits: seconds in which this process could run.

Slurm's gang scheduling, `scontrol suspend` and a freezer stop all processes of a job, and let them
go on minutes later. No limit may count that time. The kernel does not tell a process that it was
stopped, so a thread looks at the time every `TICK`; a longer gap counts as `MOST` of it. Event
loops of `run` wait by this clock, and so do the time-outs of asyncio, httpx and aiohttp in them.
"""

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

TICK = 0.5
MOST = 2 * TICK
"""A gap between two looks counts as at most so much: a busy machine may be late."""

T = TypeVar("T")


class RunningClock:
    """Seconds in which its process ran, for one that calls `now` every `TICK` while it waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen, self._seconds = time.monotonic(), 0.0

    def now(self) -> float:
        """The seconds since the clock was made."""
        with self._lock:
            seen = time.monotonic()
            self._seconds += min(seen - self._seen, MOST)
            self._seen = seen
            return self._seconds

    def after_fork(self) -> None:
        """In a forked child: the lock may have been held by a thread that is not there."""
        self._lock = threading.Lock()


_CLOCK = RunningClock()
_STARTING = threading.Lock()
_is_ticking = False


def _after_fork() -> None:
    global _STARTING, _is_ticking
    _STARTING, _is_ticking = threading.Lock(), False
    _CLOCK.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _tick() -> None:
    while True:
        time.sleep(TICK)
        _CLOCK.now()


def running_time() -> float:
    """Like `time.monotonic()`, but without the time in which this process was stopped."""
    global _is_ticking
    if not _is_ticking:
        with _STARTING:
            if not _is_ticking:
                threading.Thread(target=_tick, name="clock", daemon=True).start()
                _is_ticking = True
    return _CLOCK.now()


class RunningLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers do not count the time in which this process was stopped."""

    def time(self) -> float:
        """The time that timers are due by."""
        return running_time()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, in a `RunningLoop`."""
    with asyncio.Runner(loop_factory=RunningLoop) as runner:
        return runner.run(coroutine)


def wait_for_end(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The return code of `process` if it ends within `seconds` of this clock; else None."""
    deadline = running_time() + seconds
    while process.poll() is None and (left := deadline - running_time()) > 0:
        try:
            process.wait(min(left, TICK))
        except subprocess.TimeoutExpired:
            continue
    return process.returncode
