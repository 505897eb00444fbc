"""Runs tasks in several processes, with a shared count of the bytes that are done."""

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
"""Called with the total number of bytes done so far."""
POLL_SECONDS = 0.2
SIGNALS = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM}
"""Signals that ask a process to end."""
_PR_SET_PDEATHSIG = 1  # of prctl(2)

# Set once in each worker process, which is forked for one call of `run_tasks`.
_task: Callable[[Any], Any]
_num_bytes: "Synchronized[int] | None" = None


def add_bytes(count: int) -> None:
    """Report from within a task that `count` more bytes are done."""
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

    Workers inherit `task` and everything it refers to in its current state, and die with the
    caller. The first failure is raised once all tasks that have begun have ended; if a worker is
    killed, ``BrokenProcessPool`` is raised.
    """
    context = get_context("fork")
    counter = context.Value("q", 0)
    num_workers = max(1, min(num_workers, len(items)))
    arguments = (task, counter, os.getpid())
    executor = ProcessPoolExecutor(num_workers, context, _start_worker, arguments)
    try:
        # Workers are forked with signals blocked until they have removed our handlers: Python's
        # code that runs after a fork drops exceptions of handlers, so a signal would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            futures = [executor.submit(_run, item) for item in items]
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        pending = set(futures)
        while pending:
            done, pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
            progress(counter.get_obj().value)  # without the lock: a killed worker may hold it
            for future in done:
                future.result()
    finally:
        executor.shutdown(cancel_futures=True)
    return [future.result() for future in futures]


def _start_worker(task: Callable[[Any], Any], num_bytes: "Synchronized[int]", parent: int) -> None:
    global _task, _num_bytes
    # Make Linux kill this process when its parent ends, even by SIGKILL.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)
    # Only the caller handles signals. In a worker its handlers would turn them into task failures,
    # and a worker that is terminated because another was killed would wait for its next task.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    _task, _num_bytes = task, num_bytes


def _run(item: Any) -> Any:
    return _task(item)
