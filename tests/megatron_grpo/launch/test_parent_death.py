"""Processes that end with the one that started them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from engines import wait_until
from megatron_grpo.launch import parent_death

# Starts a sleeper through the wrapper, tells its pid, and waits.
PARENT = """
import os, subprocess, sys
wrapped = [sys.executable, sys.argv[1], str(os.getpid()), "sleep", "60"]
print(subprocess.Popen(wrapped).pid, flush=True)
sys.stdin.read()
"""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_the_command_dies_when_its_parent_is_killed():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, parent_death.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    sleeper = int(parent.stdout.readline())
    assert wait_until(lambda: Path(f"/proc/{sleeper}/comm").read_text() == "sleep\n", 5)
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert wait_until(lambda: not is_running(sleeper), 5)


def test_the_command_is_not_started_when_its_parent_is_gone():
    gone = subprocess.Popen(["true"])
    gone.wait()
    command = [sys.executable, parent_death.__file__, str(gone.pid), "echo", "started"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stdout == ""


def test_the_command_keeps_its_arguments_and_exit_code():
    command = [sys.executable, parent_death.__file__, str(os.getpid()), "sh", "-c", "exit 7"]
    assert subprocess.run(command).returncode == 7
