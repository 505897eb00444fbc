"""What a process that was stopped says of its time, in processes that are stopped."""

import signal
import subprocess
import sys
import time

import pytest

STOPPED_SECONDS = 3.0

IDLE = """
print("ready", flush=True)
time.sleep(1)
"""
# Holds the GIL, so that no other thread can look at the time.
BUSY = """
print("ready", flush=True)
9 ** 12_000_000
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
    begun, real = running_time(), time.monotonic()
    time.sleep(1.5)
    ran, passed = running_time() - begun, time.monotonic() - real
    assert abs(ran - passed) < 0.5, (ran, passed)
    os._exit(0)
assert os.wait()[1] == 0
print("ready", flush=True)
time.sleep(1)
"""


def stopped_and_passed(program: str, stop: bool) -> tuple[float, float]:
    """The seconds that a process left out, and those that passed, while it ran `program`."""
    begin = (
        "import asyncio, os, time\nfrom parallel.clock import *\nfrom parallel.clock import run\n"
    )
    begin += "begun, real = running_time(), time.monotonic()\n"
    end = "print(stopped_time(), time.monotonic() - real, flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", begin + program + end], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if stop:
            process.send_signal(signal.SIGSTOP)
            time.sleep(STOPPED_SECONDS)
            process.send_signal(signal.SIGCONT)
        stopped, passed = map(float, process.stdout.readline().split())
    assert process.returncode == 0
    return stopped, passed


@pytest.mark.parametrize("program", [IDLE, TIMERS], ids=["idle", "waits with a limit"])
def test_time_in_which_a_process_was_stopped_does_not_count(program: str) -> None:
    stopped, passed = stopped_and_passed(program, stop=True)
    assert passed > STOPPED_SECONDS
    assert STOPPED_SECONDS - 1.1 < stopped <= passed - 0.5, (stopped, passed)


@pytest.mark.parametrize("program", [BUSY, CHILD], ids=["holds the GIL", "has forked"])
def test_all_time_counts_in_which_a_process_runs(program: str) -> None:
    stopped, passed = stopped_and_passed(program, stop=False)
    assert stopped < 0.2 * passed, (stopped, passed)
