"""A unit of CPU time: a fixed piece of work on this machine, as busy as it is now."""

import time


def seconds_of_a_million_numbers() -> float:
    """CPU seconds in which this process formats a million numbers."""
    start = time.process_time()
    assert sum(len(str(number)) for number in range(1_000_000)) == 5_888_890
    return time.process_time() - start
