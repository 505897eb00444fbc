"""Giving the machine back: all ranks stop at the same step, save, and leave with exit code 75."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_PREEMPTED = 75
"""EX_TEMPFAIL: nothing has failed, and the same command goes on."""

PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send before they take the machine away."""


class Preempted(Exception):
    """Somebody wants the machine back; the text says what is saved."""


@contextmanager
def preempted_instead(is_preempted: Callable[[], bool]) -> Iterator[None]:
    """Raise Preempted for what fails in the block when somebody wants the machine back."""
    try:
        yield
    except Exception as error:
        # Slurm tells engines and what rewards have started to end at the same moment.
        if is_preempted():
            raise Preempted(str(error)) from error
        raise
