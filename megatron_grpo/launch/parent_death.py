"""Processes that cannot outlive the one that started them, not even when SIGKILL ends that one."""

import ctypes
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1
TRACKER = b"multiprocessing.resource_tracker"
ENDED = signal.SIGUSR2
OTHERS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""What a terminal or Slurm sends to all: not for the process that waits for `ENDED`."""


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Ask Linux to signal this process when the thread that started it ends (prctl(2)).

    The setting survives exec and is not inherited by children. A parent that died before the call
    is for the caller to notice.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by, 0, 0, 0)


def kill_group(group: int) -> bool:
    """Kill the other processes of a group, also stopped ones; whether there were any.

    Python's resource trackers are spared: they unlink the shared memory that the others leave
    behind, and end then.
    """
    members = list(_users_of_memory(group))
    for pid in members:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(members)


def _users_of_memory(group: int) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            state, _, of_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            is_tracker = TRACKER in (folder / "cmdline").read_bytes()
            pid = int(folder.name)
            if int(of_group) == group and state != "Z" and not is_tracker and pid != os.getpid():
                yield pid


def main() -> None:
    """Become a command, tied to its parent: `python parent_death.py PID FOLDER PROGRAM ARG ...`.

    PID is the parent's. The command leads a process group; what it starts is killed when it ends:
    who is started by it may be tied to it by then, or not yet. FOLDER, made for its files, goes
    behind them all.
    """
    parent, folder, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    leader = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (ENDED, *OTHERS))
    if os.fork() == 0:
        _tidy_behind(leader, folder)
    die_with_parent()
    if os.getppid() != parent:
        sys.exit("the process that asked for this one is gone")
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.execvp(command[0], command)


def _tidy_behind(leader: int, folder: str) -> NoReturn:
    """Wait for the end of the parent, the `leader` of a group; kill and remove what is left."""
    die_with_parent(ENDED)
    if os.getppid() == leader:
        signal.sigwait({ENDED})
    while kill_group(leader):  # it may have started others meanwhile
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
