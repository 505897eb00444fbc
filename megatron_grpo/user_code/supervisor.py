"""The process between the trainer and a worker: where it ends, nothing of that is left.

`python supervisor.py TRAINER_PID FD MEGABYTES MODULE` starts `python -m MODULE FD MEGABYTES`, and
ends when that ends, or on SIGUSR2 (`END`), or when the trainer dies. The user's code in it may
start processes, in sessions of their own, whose parents have ended: Linux makes them children of
this one (PR_SET_CHILD_SUBREAPER), which kills its children until it has none.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from megatron_grpo.launch.parent_death import die_with_parent

PR_SET_CHILD_SUBREAPER = 36
END = signal.SIGUSR2
"""Not SIGHUP or SIGINT: who is started by `nohup` or behind a script's `&` inherits that they are
ignored, and they are lost while this interpreter starts."""
SIGNALS = (END, signal.SIGCHLD)
SCHEDULERS = (signal.SIGTERM, signal.SIGUSR1)
"""Slurm sends them to every process of a job step; what they mean is for the trainer to say."""


def main() -> None:
    """Run the worker; the exit code, or the signal that ends this process, is the worker's."""
    trainer, fd, megabytes, module = sys.argv[1:]
    # Blocked, they wait until they are asked for, from before there is anything to kill.
    signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, *SCHEDULERS))
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    die_with_parent(END)
    if os.getppid() != int(trainer):
        sys.exit("the trainer is gone")
    worker = _start_worker(module, fd, megabytes)
    os.close(int(fd))  # the trainer must see that the worker has closed it
    status = _wait(worker)
    kill_all()
    _end_like(status)


def kill_all() -> None:
    """Kill the children of this process, and those that it gets by that, until there are none."""
    while children := Path("/proc/thread-self/children").read_text().split():
        for pid in map(int, children):
            os.kill(pid, signal.SIGKILL)  # nobody else reaps it: the id is not another's yet
        for pid in map(int, children):
            os.waitpid(pid, 0)


def _start_worker(module: str, fd: str, megabytes: str) -> int:
    supervisor = os.getpid()

    def begin() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, SCHEDULERS)  # until it can handle them
        die_with_parent()
        if os.getppid() != supervisor:
            os._exit(1)

    command = [sys.executable, "-m", module, fd, megabytes]
    # A session of its own: a function that signals its process group must not end this process.
    return subprocess.Popen(
        command, pass_fds=[int(fd)], start_new_session=True, preexec_fn=begin
    ).pid


def _wait(worker: int) -> int:
    """The worker's exit status; 0 when this process was told to end it."""
    while signal.sigwait(SIGNALS) == signal.SIGCHLD:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == worker:
                    return ended[1]
    return 0


def _end_like(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has left its own
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
