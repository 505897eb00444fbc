"""The sentinel of a rank, in real processes."""

import subprocess
import sys

from helpers.engines.live import wait_until
from helpers.ranks.processes import is_alive

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


def test_sentinel_spares_a_rank_that_ended_though_another_has_the_pipe():
    program = RANK.format(dump=30, kill=2) + ENDS
    ended = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert ended.returncode == 0


def test_sentinel_ends_with_its_rank_though_another_has_the_pipe():
    program = RANK.format(dump=30, kill=60) + "os.kill(os.getpid(), signal.SIGKILL)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        sentinel, other = map(int, rank.stdout.readline().split())
    assert wait_until(lambda: not is_alive(sentinel), 20)
    subprocess.run(["kill", str(other)], check=True)
