"""Processes that end with the one that started them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.engines import wait_until
from helpers.ranks import is_alive
from megatron_grpo.launch import parent_death

# Starts a sleeper through the wrapper, tells its pid, and waits.
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


def test_command_dies_when_its_parent_is_killed_and_its_folder_goes(folder):
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


def test_command_is_not_started_when_its_parent_is_gone_and_its_folder_goes(folder):
    gone = subprocess.Popen(["true"])
    gone.wait()
    command = [sys.executable, parent_death.__file__, str(gone.pid), folder, "echo", "started"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stdout == ""
    assert wait_until(lambda: not folder.exists(), 30)


def test_command_keeps_its_arguments_and_exit_code(folder):
    tied = [sys.executable, parent_death.__file__, str(os.getpid()), folder]
    assert subprocess.run([*tied, "sh", "-c", "exit 7"]).returncode == 7
