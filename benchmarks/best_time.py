"""The time of a piece of work when nothing disturbs it."""

import time
from collections.abc import Callable


def best_time(work: Callable[[], object], num_times: int = 5) -> float:
    """Seconds of the fastest of `num_times` calls, after one that warms up."""
    seconds = []
    for _ in range(num_times + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
