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
"""Signals of terminals and Slurm to all processes; the process waiting for `ENDED` blocks them."""


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Ask Linux to signal this process, also after exec, when the thread that started it ends
    (prctl(2)). The caller must check that the parent did not end before this call."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs (PR_SET_CHILD_SUBREAPER of prctl(2))."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_tree(root: int) -> None:
    """Kill a child of this process that adopts orphans, and all its descendants."""
    # Stopped first: a running process could fork faster than the walk finds its children.
    os.kill(root, signal.SIGSTOP)
    stopped = {root}
    deadline = time.monotonic() + TREE_SECONDS
    # A process that forks and ends during a walk hides its child, which the root then adopts: only
    # two walks in a row that find the same dead processes show that nothing is left.
    ended: set[int] | None = None
    while time.monotonic() < deadline:
        found, is_any_living, left = set[int](), False, children(root)
        while left:
            found.add(pid := left.pop())
            with suppress(OSError):  # it has ended
                if state_of(pid) not in DEAD:
                    is_any_living = True
                    os.kill(pid, signal.SIGKILL if pid in stopped else signal.SIGSTOP)
                    stopped.add(pid)
            # Read now, not from a list of all processes (psutil): a stopped process starts no
            # others, and its children keep their ids.
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
    """Letter of a process's state, such as T if it is stopped (proc(5))."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def kill_group(group: int) -> bool:
    """Kill the other processes of a group, even stopped ones; returns whether there were any."""
    is_any_killed = False
    for pid in {int(name) for name in os.listdir("/proc") if name.isdecimal()} - {os.getpid()}:
        with suppress(OSError):  # it has ended
            if os.getpgid(pid) != group or state_of(pid) in DEAD:
                continue
            # Python's resource trackers unlink the others' shared memory, and then end.
            if RESOURCE_TRACKER not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                is_any_killed = True
    return is_any_killed


def main() -> None:
    """Run a command tied to its parent PID: `python parent_death.py PID FOLDER PROGRAM ARG ...`.

    The command leads a process group. When it ends, the rest of the group is killed, and FOLDER,
    made for its files, is removed.
    """
    parent, folder, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    leader = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (ENDED, *OTHERS))
    # A second process, as others of the group may not be tied to the leader yet when it ends.
    if os.fork() == 0:
        _clean_up_after(leader, folder)
    die_with_parent()
    if os.getppid() != parent:
        sys.exit("the parent process is gone")
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.execvp(command[0], command)


def _clean_up_after(leader: int, folder: str) -> NoReturn:
    """Wait until the parent, the `leader` of a group, ends; kill the group and remove `folder`."""
    die_with_parent(ENDED)
    if os.getppid() == leader:
        signal.sigwait({ENDED})
    while kill_group(leader):  # killed processes may have started others meanwhile
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
