"""Wall-clock seconds of the phases of a step."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

BETWEEN = ""
"""The phase name between two phases."""
WAIT = "wait_rollout"
"""The phase in which a step waits for a generation that is made in the background."""

Record = Callable[[str, float, float], None]
"""Called with the name of a finished phase, when it began (`time.time()`) and its seconds."""


class PhaseTimer:
    """Sums seconds by phase name; `metrics()` returns `time/{phase}` and `time/step`.

    `enter` is called with the name of every phase when it begins, and `record` when it is over.

    On CUDA this adds no synchronisation: every phase ends in a host read (a loss, a gradient norm,
    a barrier), so a phase waits for everything that it has launched.
    """

    def __init__(self, enter: Callable[[str], None], record: Record | None = None) -> None:
        self._enter, self._record = enter, record
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str, part: str = "") -> Iterator[None]:
        """Add the block's seconds to phase `name`; with a `part`, it is entered as `name_part`."""
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
        self._enter(BETWEEN)  # not after an exception, which belongs to the phase

    def metrics(self) -> dict[str, float]:
        """Seconds so far by metric name, in the order in which the phases first ended."""
        total = time.perf_counter() - self._start
        return {**{f"time/{name}": s for name, s in self._seconds.items()}, "time/step": total}


def is_beside(name: str, metrics: Mapping[str, object]) -> bool:
    """Whether a metric is of a phase that ran in the background, for which the step then waited."""
    return name in ("time/generate", "time/score") and f"time/{WAIT}" in metrics
