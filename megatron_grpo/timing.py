"""Wall-clock seconds of the phases of a step."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BETWEEN = ""
"""What is entered when a phase has ended and none has begun."""


class PhaseTimer:
    """Sums seconds by phase name; `metrics()` gives `time/{phase}` and `time/step`.

    `enter` is told the name of every phase as it begins.

    On CUDA no synchronisation is added: every phase ends in a host read (a loss, a gradient norm, a
    barrier), so what a phase has launched is also what it has waited for.
    """

    def __init__(self, enter: Callable[[str], None]) -> None:
        self._enter = enter
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str, part: str = "") -> Iterator[None]:
        """Add the seconds of the block to phase `name`; a `part` of it is entered by both names."""
        self._enter(f"{name}_{part}" if part else name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start
        self._enter(BETWEEN)  # not after an exception: that belongs to the phase

    def metrics(self) -> dict[str, float]:
        """Seconds so far, by metric name, in the order in which the phases began."""
        total = time.perf_counter() - self._start
        return {**{f"time/{name}": s for name, s in self._seconds.items()}, "time/step": total}
