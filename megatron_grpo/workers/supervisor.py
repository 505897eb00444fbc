"""The process between the trainer and a worker: when it ends, no process of the worker is left.

`python supervisor.py TRAINER_PID FD MEGABYTES MODULE` starts `python -m MODULE FD MEGABYTES`. It
ends with that worker, on SIGUSR2 (`END`), or when the trainer dies. User code may leave orphans in
sessions of their own: Linux makes them children of this process (PR_SET_CHILD_SUBREAPER), which
kills its children until it has none.
"""

import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress

from megatron_grpo.launch.parent_death import adopt_orphans, children, die_with_parent

END = signal.SIGUSR2
"""Signal to end. Not SIGHUP or SIGINT, which a process of `nohup` or a script's `&` inherits as
ignored: they would be lost while this interpreter starts."""
SIGNALS = (END, signal.SIGCHLD)
SCHEDULERS = (signal.SIGTERM, signal.SIGUSR1)
"""Slurm sends these to every process of a job step; only the trainer acts on them."""


def main() -> None:
    """Run the worker; this process exits with the worker's exit code, or dies by its signal."""
    trainer, fd, megabytes, module = sys.argv[1:]
    # Blocked before there is anything to kill, they stay pending until `sigwait`.
    signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, *SCHEDULERS))
    adopt_orphans()
    die_with_parent(END)
    if os.getppid() != int(trainer):  # it died before `die_with_parent`, which then does nothing
        sys.exit("the trainer is gone")
    worker = _start_worker(module, fd, megabytes)
    os.close(int(fd))  # the trainer must see that the worker has closed it
    status = _wait(worker)
    kill_all()
    _end_like(status)


def kill_all() -> None:
    """Kill the children of this process until none is left: it inherits theirs."""
    while left := children(os.getpid()):
        for pid in left:
            os.kill(pid, signal.SIGKILL)  # its id is not reused: only this process reaps it
        for pid in left:
            os.waitpid(pid, 0)


def _start_worker(module: str, fd: str, megabytes: str) -> int:
    supervisor = os.getpid()

    def begin() -> None:
        # Slurm's signals alone; `begin_worker` unblocks them once it has handlers.
        signal.pthread_sigmask(signal.SIG_SETMASK, SCHEDULERS)
        die_with_parent()
        if os.getppid() != supervisor:
            os._exit(1)

    command = [sys.executable, "-m", module, fd, megabytes]
    # A session of its own: a function that signals its process group must not end this process.
    return subprocess.Popen(
        command, pass_fds=[int(fd)], start_new_session=True, preexec_fn=begin
    ).pid


def _wait(worker: int) -> int:
    """The worker's exit status; 0 after a signal to end."""
    while signal.sigwait(SIGNALS) == signal.SIGCHLD:
        with suppress(ChildProcessError):
            # All that have ended: SIGCHLD does not queue, and adopted orphans end as well.
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == worker:
                    return ended[1]
    return 0


def _end_like(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has dumped its own core
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
