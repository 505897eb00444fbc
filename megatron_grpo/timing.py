"""Wall-clock seconds of the phases of a step."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

BETWEEN = ""
"""What is entered when a phase has ended and none has begun."""
WAIT = "wait_rollout"
"""The phase in which a step waits for a generation that is made beside it."""

Record = Callable[[str, float, float], None]
"""Told the name of a phase that is over, when it began (`time.time()`), and how long it took."""


class PhaseTimer:
    """Sums seconds by phase name; `metrics()` gives `time/{phase}` and `time/step`.

    `enter` is told the name of every phase as it begins, and `record` when it is over.

    On CUDA no synchronisation is added: every phase ends in a host read (a loss, a gradient norm, a
    barrier), so what a phase has launched is also what it has waited for.
    """

    def __init__(self, enter: Callable[[str], None], record: Record | None = None) -> None:
        self._enter, self._record = enter, record
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str, part: str = "") -> Iterator[None]:
        """Add the seconds of the block to phase `name`; a `part` of it is entered by both names."""
        both = f"{name}_{part}" if part else name
        self._enter(both)
        began, start = time.time(), time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._seconds[name] += seconds
            if self._record:
                self._record(both, began, seconds)
        self._enter(BETWEEN)  # not after an exception: that belongs to the phase

    def metrics(self) -> dict[str, float]:
        """Seconds so far, by metric name, in the order in which the phases began."""
        total = time.perf_counter() - self._start
        return {**{f"time/{name}": s for name, s in self._seconds.items()}, "time/step": total}


def is_beside(name: str, metrics: Mapping[str, object]) -> bool:
    """Whether a metric is of a phase that ran beside the step, which then waited for it."""
    return name in ("time/generate", "time/score") and f"time/{WAIT}" in metrics
