"""Child processes that cannot outlive their parent, not even when it is killed by SIGKILL."""

import ctypes
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
RESOURCE_TRACKER = b"multiprocessing.resource_tracker"
DEAD = ("Z", "X")
"""States of processes that have ended."""
ENDED = signal.SIGUSR2
TREE_SECONDS = 5.0
"""Time in which a tree of processes is killed, unless a device driver blocks one."""
OTHERS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals of terminals and Slurm to all processes; the one waiting for `ENDED` blocks them."""


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Ask Linux to signal this process when the thread that started it ends (prctl(2)), also after
    exec. The caller must check whether the parent died before this call."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by, 0, 0, 0)


def adopt_orphans() -> None:
    """Be the parent of all descendants whose parents end (PR_SET_CHILD_SUBREAPER of prctl(2))."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_tree(root: int) -> None:
    """Kill a child of this process that adopts orphans, and all its descendants.

    They are stopped first: else one could fork faster than it is found. One that forks and ends
    meanwhile may hide its child, then the root's: nothing is left when two walks have found the
    same processes, and none of them lives.
    """
    os.kill(root, signal.SIGSTOP)
    stopped = {root}
    deadline = time.monotonic() + TREE_SECONDS
    ended: set[int] | None = None  # what the last walk found, if none of it lived
    while time.monotonic() < deadline:
        found, is_any_living, left = set[int](), False, children(root)
        while left:
            found.add(pid := left.pop())
            with suppress(OSError):  # it has ended
                if state_of(pid) not in DEAD:
                    is_any_living = True
                    os.kill(pid, signal.SIGKILL if pid in stopped else signal.SIGSTOP)
                    stopped.add(pid)
            # Not from a picture of all processes (psutil): a stopped one starts no others, and its
            # children keep their ids.
            left += children(pid)
        if not is_any_living and found == ended:
            break
        ended = None if is_any_living else found
    os.kill(root, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """The children of a process, the latest last; none once it has ended."""
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            path = Path(f"/proc/{pid}/task/{task}/children")
            found += map(int, path.read_text(encoding="utf-8").split())
    return found


def state_of(pid: int) -> str:
    """The letter of a process's state, such as T for a stopped one (proc(5))."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def kill_group(group: int) -> bool:
    """Kill the other processes of a group, even stopped ones; returns whether there were any.
    Spares resource trackers of Python: they unlink the others' shared memory, and then end."""
    is_any_killed = False
    for pid in {int(name) for name in os.listdir("/proc") if name.isdecimal()} - {os.getpid()}:
        with suppress(OSError):  # it has ended
            if os.getpgid(pid) != group or state_of(pid) in DEAD:
                continue
            if RESOURCE_TRACKER not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                is_any_killed = True
    return is_any_killed


def main() -> None:
    """Run a command tied to its parent PID: `python parent_death.py PID FOLDER PROGRAM ARG ...`.

    It leads a process group. When it ends, the others of the group are killed (they may not have
    been tied to it yet), and FOLDER, made for its files, is removed.
    """
    parent, folder, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    leader = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (ENDED, *OTHERS))
    if os.fork() == 0:
        _clean_up_after(leader, folder)
    die_with_parent()
    if os.getppid() != parent:
        sys.exit("the parent process is gone")
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.execvp(command[0], command)


def _clean_up_after(leader: int, folder: str) -> NoReturn:
    """Wait until the parent, the `leader` of a group, ends; then kill it, remove `folder`."""
    die_with_parent(ENDED)
    if os.getppid() == leader:
        signal.sigwait({ENDED})
    while kill_group(leader):  # killed processes may have started others meanwhile
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
