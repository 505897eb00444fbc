"""Clocks of processes that are stopped and continued."""

import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from hashlib import sha256
from threading import Thread

import pytest

from parallel.clock import MOST, RunningClock, result_within

STOPPED_SECONDS = 3.0

IDLE = """
print("ready", flush=True)
time.sleep(1)
"""
# Holds the GIL, so that no other thread can read the clock.
BUSY = """
print("ready", flush=True)
9 ** 6_000_000
"""
TIMERS = """
async def limited():
    async with asyncio.timeout(2.9):
        await asyncio.sleep(0.5)
        print("ready", flush=True)
        await asyncio.sleep(0.6)
run(limited())
"""
CHILD = """
if os.fork() == 0:
    begun = running_time()
    time.sleep(3)
    os._exit(0 if running_time() - begun > 2 else 1)
assert os.wait()[1] == 0
print("ready", flush=True)
time.sleep(1)
"""


def times_of(program: str, *, stop: bool) -> list[float]:
    """Seconds of `program`: counted as stopped, passed, and of CPU time."""
    begin = (
        "import asyncio, os, time\nfrom parallel.clock import *\nfrom parallel.clock import run\n"
    )
    begin += "begun, real = running_time(), time.monotonic()\n"
    end = "print(stopped_time(), time.monotonic() - real, time.process_time(), flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", begin + program + end], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if stop:
            process.send_signal(signal.SIGSTOP)
            time.sleep(STOPPED_SECONDS)
            process.send_signal(signal.SIGCONT)
        times = [*map(float, process.stdout.readline().split())]
    assert process.returncode == 0
    return times


@pytest.mark.parametrize("program", [IDLE, TIMERS], ids=["idle", "waits with a limit"])
def test_time_in_which_a_process_was_stopped_does_not_count(program):
    stopped, passed, _ = times_of(program, stop=True)
    assert passed > STOPPED_SECONDS
    assert STOPPED_SECONDS - 1.1 < stopped <= passed - 0.5, (stopped, passed)


def test_computing_counts_while_no_thread_can_read_the_clock():
    stopped, passed, computed = times_of(BUSY, stop=False)
    assert passed - stopped > 0.9 * computed


def test_time_counts_in_a_forked_process():
    assert times_of(CHILD, stop=False)


def test_a_stop_does_not_count_after_other_threads_have_computed():
    def compute() -> None:
        while time.thread_time() < MOST + 1:
            sha256(bytes(1 << 20))

    clock, thread = RunningClock(), Thread(target=compute)
    thread.start()
    thread.join()  # nobody reads the clock meanwhile, as in a stop
    assert clock.now() < MOST + 0.5


def test_a_result_that_is_a_time_out_is_raised_at_once():
    future: Future[None] = Future()
    future.set_exception(TimeoutError("its own"))
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match="its own"):
        result_within(future, 30)
    assert time.monotonic() - begun < 15
    with pytest.raises(TimeoutError):
        result_within(Future[None](), 0.01)
