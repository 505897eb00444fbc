"""Processes that cannot outlive the one that started them, not even when SIGKILL ends that one."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Ask Linux to signal this process when the thread that started it ends (prctl(2)).

    The setting survives exec and is not inherited by children. A parent that died before the call
    is for the caller to notice.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by, 0, 0, 0)


def main() -> None:
    """Become a command, tied to its parent: `python parent_death.py PARENT_PID PROGRAM ARG ...`."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    die_with_parent()
    if os.getppid() != parent:
        sys.exit("the process that asked for this one is gone")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
