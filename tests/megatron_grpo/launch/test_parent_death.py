"""Processes end with the process that started them."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from helpers.engines.live import wait_until
from helpers.ranks.processes import is_alive
from megatron_grpo.launch import parent_death

# Starts a sleeper through the wrapper, prints its pid, and waits.
PARENT = """
import os, subprocess, sys
wrapped = [sys.executable, *sys.argv[1:2], str(os.getpid()), *sys.argv[2:], "sleep", "60"]
print(subprocess.Popen(wrapped).pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder for the files of the command, with one file in it."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").touch()
    return folder


def test_parent_death_ends_the_command_and_its_folder(folder):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, parent_death.__file__, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    sleeper = int(parent.stdout.readline())
    assert wait_until(lambda: Path(f"/proc/{sleeper}/comm").read_text() == "sleep\n", 30)
    assert folder.exists()
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert wait_until(lambda: not is_alive(sleeper), 30)
    assert wait_until(lambda: not folder.exists(), 30)
    assert folder.parent.exists()


def test_parent_death_starts_nothing_without_a_parent(folder):
    gone = subprocess.Popen(["true"])
    gone.wait()
    command = [sys.executable, parent_death.__file__, str(gone.pid), folder, "echo", "started"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stdout == ""
    assert wait_until(lambda: not folder.exists(), 30)


def test_parent_death_keeps_arguments_and_exit_code(folder):
    tied = [sys.executable, parent_death.__file__, str(os.getpid()), folder]
    assert subprocess.run([*tied, "sh", "-c", "exit 7"]).returncode == 7


# Adopts orphans, and starts a chain of processes, each of which forks the next in a session of its
# own and ends.
RUNS_AWAY = """
import os, sys, time
from megatron_grpo.launch.parent_death import adopt_orphans
adopt_orphans()
if os.fork():
    print(flush=True)
    time.sleep(60)
while not os.fork():
    os.setsid()
    time.sleep(0.002)
"""


def test_whole_tree_is_killed_while_it_forks():
    mark = f"--{uuid.uuid4().hex}"
    root = subprocess.Popen([sys.executable, "-c", RUNS_AWAY, mark], stdout=subprocess.PIPE)
    assert root.stdout.readline()
    time.sleep(0.3)  # a hundred of the chain
    parent_death.kill_tree(root.pid)
    root.communicate()
    assert not [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or ())]


def test_group_is_killed_but_for_the_tracker_of_its_shared_memory():
    program = (
        'sh -c "sleep 60 & kill -STOP \\$!; wait" & '
        "sleep 60 & exec python3 -c 'import time; time.sleep(60)' multiprocessing.resource_tracker"
    )
    leader = subprocess.Popen(["sh", "-c", program], start_new_session=True)
    try:
        tracker = psutil.Process(leader.pid)
        assert wait_until(lambda: len(tracker.children(recursive=True)) == 3, 30)
        others = tracker.children(recursive=True)
        assert wait_until(lambda: any(each.status() == "stopped" for each in others), 30)
        assert wait_until(lambda: "python3" in tracker.cmdline()[0], 30)
        assert parent_death.kill_group(leader.pid)
        assert wait_until(lambda: not any(is_alive(each.pid) for each in others), 30)
        assert leader.poll() is None
        assert not parent_death.kill_group(leader.pid)
    finally:
        leader.kill()
        leader.wait()
