"""Tasks shared by several processes, with a count of the bytes that are done."""

import ctypes
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[int], None]
"""Told how many bytes are done in all."""
POLL_SECONDS = 0.2
SIGNALS = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM}
"""Those that ask a process to end."""
_PR_SET_PDEATHSIG = 1  # of prctl(2)

# Set once in each worker process, which is forked for one call of `run_tasks`.
_task: Callable[[Any], Any]
_num_bytes: "Synchronized[int] | None" = None


def add_bytes(count: int) -> None:
    """Called by a task: `count` more bytes are done."""
    if _num_bytes is not None:
        with _num_bytes.get_lock():
            _num_bytes.value += count


def run_tasks(
    task: Callable[[Item], Result],
    items: Sequence[Item],
    num_workers: int,
    progress: Progress = lambda num_bytes: None,
) -> list[Result]:
    """``[task(item) for item in items]`` over `num_workers` forked processes.

    Workers share `task` and what it refers to as it is now, and die with the caller. The first
    failure is raised once the tasks that have begun have ended; a worker that was killed is a
    ``BrokenProcessPool``.
    """
    context = get_context("fork")
    counter = context.Value("q", 0)
    num_workers = max(1, min(num_workers, len(items)))
    arguments = (task, counter, os.getpid())
    executor = ProcessPoolExecutor(num_workers, context, _start_worker, arguments)
    try:
        # The workers are forked with signals blocked, until they have let go of our handlers:
        # Python's own work after a fork drops what a handler raises, and the signal were lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            futures = [executor.submit(_run, item) for item in items]
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        pending = set(futures)
        while pending:
            done, pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
            progress(counter.get_obj().value)  # whoever was killed may hold the lock
            for future in done:
                future.result()
    finally:
        executor.shutdown(cancel_futures=True)
    return [future.result() for future in futures]


def _start_worker(task: Callable[[Any], Any], num_bytes: "Synchronized[int]", parent: int) -> None:
    global _task, _num_bytes
    # Linux is to kill this process when its parent ends, even by SIGKILL.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before that
        os._exit(1)
    # Signals are the caller's to handle. Its handlers would make them failures of a task here, and
    # a worker that is told to end, because another was killed, would wait for its next task.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    _task, _num_bytes = task, num_bytes


def _run(item: Any) -> Any:
    return _task(item)
