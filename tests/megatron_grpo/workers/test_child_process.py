"""Starting processes that are tied to their parent, from any thread."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.engines.live import wait_until
from helpers.ranks.processes import is_alive
from megatron_grpo.workers.child_process import ChildProcess, spawn


def start_in_a_thread_that_ends(log: Path) -> ChildProcess:
    with ThreadPoolExecutor(1) as thread, log.open("wb") as output:
        return thread.submit(ChildProcess.start, ["sleep", "60"], os.environ, output).result()


def sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text() == "sleep\n"


def test_process_outlives_the_thread_that_asked_for_it(tmp_path):
    child = start_in_a_thread_that_ends(tmp_path / "log")
    try:
        assert wait_until(lambda: sleeps(child.process.pid), 30)
        time.sleep(0.2)
        assert child.end() == ""
    finally:
        child.kill()
    assert child.end() == "ended with signal SIGKILL"
    assert not child.folder.exists()


def test_caller_gets_the_error_and_later_starts_are_served():
    with pytest.raises(FileNotFoundError, match="no_such_program"):
        spawn(["no_such_program"])
    assert spawn(["sh", "-c", "exit 7"]).wait() == 7


# Starts a process, which needs the thread that the fork lacks, and another in the fork.
FORK = """
import os, sys
from megatron_grpo.workers.child_process import spawn
spawn(["true"]).wait()
if (pid := os.fork()) == 0:
    sys.exit(spawn(["sh", "-c", "exit 7"]).wait())
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_fork_starts_processes_too():
    assert subprocess.run([sys.executable, "-c", FORK], timeout=60).returncode == 7


# Starts a sleeper in a thread that ends, prints its pid, and waits.
PARENT = """
import os, sys, threading
from megatron_grpo.workers.child_process import ChildProcess
def start():
    with open(os.devnull, "wb") as output:
        child = ChildProcess.start(["sleep", "60"], os.environ, output)
        print(child.process.pid, flush=True)
thread = threading.Thread(target=start)
thread.start()
thread.join()
sys.stdin.read()
"""


def test_process_dies_when_its_parent_is_killed():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    sleeper = int(parent.stdout.readline())
    assert wait_until(lambda: sleeps(sleeper), 30)
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert wait_until(lambda: not is_alive(sleeper), 30)
