"""Preemption: all ranks stop at the same step, save, and exit with code 75."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_PREEMPTED = 75
"""EX_TEMPFAIL: nothing has failed, and the same command resumes the run."""

PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that schedulers send before they reclaim the machine."""


@contextmanager
def exit_when_preempted() -> Iterator[None]:
    """In the block, the signals end this process with EXIT_PREEMPTED: there is nothing to save."""
    before = {
        number: signal.signal(number, lambda *_: sys.exit(EXIT_PREEMPTED))
        for number in PREEMPTION_SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Preempted(Exception):
    """The run was told to stop; the message says what is saved."""


@contextmanager
def preempted_instead(is_preempted: Callable[[], bool]) -> Iterator[None]:
    """Turn an exception in the block into Preempted if the run was told to stop."""
    try:
        yield
    except Exception as error:
        # Slurm signals engines and processes of rewards at the same moment, so these fail, too.
        if is_preempted():
            raise Preempted(str(error)) from error
        raise
