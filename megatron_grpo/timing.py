"""Wall-clock seconds of the phases of a step, and their timeline.

The timeline is for chrome://tracing and https://ui.perfetto.dev.
"""

import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

IDLE = ""
"""Phase name between two phases."""
WAIT = "wait_rollout"
"""Phase in which a step waits for a generation in the background."""

Record = Callable[[str, float, float], None]
"""Called with the name of a finished phase, its beginning (`time.time()`) and its seconds."""


class PhaseTimer:
    """Sums seconds by phase name; `metrics()` returns `time/{phase}` and `time/step`.

    `enter` is called with the name of every phase when it begins, and `record` when it ends. On
    CUDA this adds no synchronisation: every phase ends in a host read (a loss, a gradient norm, a
    barrier), which waits for the phase's kernels.
    """

    def __init__(self, enter: Callable[[str], None], record: Record | None = None) -> None:
        self._enter, self._record = enter, record
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._phase, self._inner = IDLE, 0.0
        """The current phase, and the seconds of phases within it."""

    @contextmanager
    def phase(self, name: str, part: str = "") -> Iterator[None]:
        """Add the block's seconds to phase `name`; with a `part`, it is entered as `name_part`. A
        phase within another one interrupts that."""
        both = f"{name}_{part}" if part else name
        self._enter(both)
        outer, before = self._phase, self._inner
        self._phase, self._inner = both, 0.0
        began, start = time.time(), time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._seconds[name] += seconds - self._inner
            self._phase, self._inner = outer, before + seconds
            if self._record:
                self._record(both, began, seconds)
        self._enter(outer)  # not in `finally`: an exception belongs to the phase

    def leave_out(self, seconds: float) -> None:
        """Leave past `seconds` out of the time of the step."""
        self._start += seconds

    def metrics(self) -> dict[str, float]:
        """Seconds so far by metric name, in the order in which the phases first ended."""
        total = time.perf_counter() - self._start
        return {**{f"time/{name}": s for name, s in self._seconds.items()}, "time/step": total}


def is_in_background(name: str, metrics: Mapping[str, object]) -> bool:
    """Whether the phase of a metric ran in the background: the step only waited for its end."""
    return name in ("time/generate", "time/score") and f"time/{WAIT}" in metrics


TIMELINE_FILE = "timeline.json"
SEPARATOR, END = b",\n", b"\n]\n"
"""Text behind each event, and behind the last one once the run has ended."""
TRAINER, ROLLOUT = 0, 1
"""Rows: rank 0's part of the steps, and from ROLLOUT on generations in the background."""


class Timeline:
    """Appends finished phases to the file, in Chrome's trace event format.

    The format is a JSON array whose closing bracket may be missing, so the file of a run that goes
    on or was killed can be opened, and lacks only the unfinished phase; `close` makes it whole
    JSON. Times are wall-clock times: a resumed run continues in the same file, after a gap.

    Rank 0 alone suffices, because ranks enter and leave phases together. A step adds some ten lines
    of about 130 bytes.
    """

    def __init__(self, path: Path, num_rollouts: int = 1) -> None:
        """Open the timeline; at most `num_rollouts` generations, of successive numbers, overlap."""
        self.num_rollouts = num_rollouts
        self.step = 0
        """The trainer's current step, counted from 1; before the first, the steps already done."""
        self._path, self._lock, self._is_broken = path, threading.Lock(), False
        is_new = not path.exists() or _cut(path) == 0
        self._file = path.open("ab", buffering=0)  # else `close` could fail on a full disk
        if is_new:
            more = (f"rollout {number}" for number in range(2, num_rollouts + 1))
            rows = [
                {"name": "thread_name", "ph": "M", "tid": row, "args": {"name": name}}
                for row, name in enumerate(["trainer", "rollout", *more])
            ]
            self._append(rows, opening=b"[\n")

    def add(self, name: str, start: float, seconds: float, row: int, **about: int) -> None:
        """Add an event that began at `start` (`time.time()`) and has ended; safe from any
        thread."""
        times = {"ts": round(start * 1e6), "dur": round(seconds * 1e6)}  # the format counts in µs
        self._append([{"name": name, "ph": "X", **times, "tid": row, "args": about}])

    def add_rollout(
        self, name: str, start: float, seconds: float, *, generation: int, policy_version: int
    ) -> None:
        """Add a phase of a generation in the background; safe from any thread."""
        row = ROLLOUT + generation % self.num_rollouts
        self.add(name, start, seconds, row, generation=generation, policy_version=policy_version)

    def add_step(self, phase: str, start: float, seconds: float) -> None:
        self.add(phase, start, seconds, TRAINER, step=self.step)

    def close(self) -> None:
        self._file.close()
        if not self._is_broken:
            with self._path.open("r+b") as file:
                file.seek(-len(SEPARATOR), os.SEEK_END)
                file.write(END)

    def _append(self, events: Iterable[dict[str, Any]], opening: bytes = b"") -> None:
        lines = [json.dumps({**event, "pid": 0}).encode() + SEPARATOR for event in events]
        data = b"".join([opening, *lines])
        with self._lock:
            if self._is_broken:
                return
            try:
                while data:
                    data = data[self._file.write(data) :]
            except OSError as error:  # a run must not fail because of its timeline
                self._is_broken = True
                print(f"{TIMELINE_FILE} is not written any further: {error}", file=sys.stderr)


def _cut(path: Path) -> int:
    """Cut off the end of the array, or a line that was unfinished when the run died; return the
    remaining bytes."""
    data = path.read_bytes()
    is_whole = data.endswith(END)
    whole = len(data) - len(END) if is_whole else data.rfind(b"\n") + 1
    os.truncate(path, whole)
    if is_whole:
        with path.open("ab") as file:
            file.write(SEPARATOR)
    return whole
