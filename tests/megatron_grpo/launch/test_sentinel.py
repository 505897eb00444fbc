"""The process beside a rank, in processes that make one."""

import subprocess
import sys
import time
from pathlib import Path

RANK = """
import os, signal, subprocess, sys
from megatron_grpo.launch.sentinel import Sentinel
sentinel = Sentinel({dump}, {kill})
# As a process that was forked while the sentinel was made.
other = subprocess.Popen(["sleep", "60"], pass_fds=[sentinel._pipe.fileno()], stdout=2)
print(sentinel._process.pid, other.pid, flush=True)
"""
ENDS = """
sentinel.end()
other.kill()
"""


def test_a_rank_that_has_ended_well_is_not_killed_though_another_process_has_the_pipe() -> None:
    program = RANK.format(dump=30, kill=2) + ENDS
    ended = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert ended.returncode == 0


def test_a_sentinel_ends_with_its_rank_though_another_process_has_the_pipe() -> None:
    program = RANK.format(dump=30, kill=60) + "os.kill(os.getpid(), signal.SIGKILL)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        sentinel, other = map(int, rank.stdout.readline().split())
    deadline = time.monotonic() + 20
    while is_running(sentinel) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(sentinel)
    subprocess.run(["kill", str(other)], check=True)


def is_running(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
