"""Rows of a step in files of gigabytes, without reading the whole file.

Every line is a JSON object with its `step` near the start, in ascending order: bisection over byte
offsets finds the first line of a step in about 20 reads. A line without a newline is still being
written. A timeline may repeat steps after a resume; a search then finds any of the repetitions.
"""

import heapq
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

STEP = re.compile(rb'"step": (\d+)')
IDENTITY = re.compile(rb'\{"step": (\d+), "prompt_index": (\d+), "sample_index": (\d+)')
"""Matches the beginning of rows of completions and tokens."""
HEAD_BYTES = 400
"""A line's step is within its first bytes; whole lines of the timeline are shorter."""
NEAR = 2**16
"""Number of bytes that are read faster than bisected."""
NO_LIMIT = 2**63


class Row(NamedTuple):
    """A line with a step, at byte offsets `start` to `end`."""

    start: int
    end: int
    step: int


def rows_of(path: Path, first: int, last: int) -> Iterator[bytes]:
    """JSON lines of the steps `first` to `last`, undecoded. A line without a step (of a timeline)
    belongs to the step before it, or to step 0."""
    if not path.exists():
        return
    with path.open("rb") as file:
        _seek(file, first)
        step = 0
        for line in file:
            own = _step_of(line)
            step = step if own is None else own
            if not line.endswith(b"\n") or step > last:
                return
            # `{`: a crash of the host may leave zeros. `,`: a timeline is one JSON array.
            if step >= first and line.startswith(b"{"):
                yield line.rstrip(b",\n")


def newest_rows(path: Path, num_bytes: int) -> list[bytes]:
    """Rows of the newest steps within `num_bytes`; at least the rows of one step."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        while num_bytes < size:
            cut = _row_from(file, size - num_bytes)
            if cut:  # its step may begin before the cut, so only later steps are whole
                newer = list(rows_of(path, cut.step + 1, NO_LIMIT))
                return newer or list(rows_of(path, cut.step, NO_LIMIT))
            num_bytes *= 2  # the last row is longer than `num_bytes`
    return list(rows_of(path, 0, NO_LIMIT))


def rows_since(path: Path, offset: int, step: int) -> tuple[int, list[bytes], bool]:
    """New rows: (offset of the last row, rows from `offset` on, whether these are all rows).

    `offset` and `step` are the last row that the caller knows; it is returned again, since metrics
    may be added to it. If another row is there, a resumed run has rewritten the file: then all rows
    are returned.
    """
    with path.open("rb") as file:
        known = _row_from(file, offset)
        starts_again = known is None or (known.start, known.step) != (offset, step)
        file.seek(0 if starts_again else offset)
        lines = [line for line in file if line.endswith(b"\n")]
    start = 0 if starts_again else offset
    return start + sum(map(len, lines[:-1])), [line[:-1] for line in lines], starts_again


def row_with(path: Path, identity: Sequence[int]) -> bytes | None:
    rows = rows_of(path, identity[0], identity[0])
    return next((row for row in rows if identity_of(row) == tuple(identity)), None)


def steps_of_prompt(path: Path, prompt_index: int) -> list[int]:
    """Steps in which a prompt occurs; reads the whole file."""
    if not path.exists():
        return []
    steps = set()
    with path.open("rb") as file:
        for line in file:
            if (row := identity_of(line)) and row[1] == prompt_index:
                steps.add(row[0])
    return sorted(steps)


def least_rows(
    path: Path, most: int, key: Callable[[dict[str, Any]], float | None]
) -> list[dict[str, Any]]:
    """At most `most` rows of all steps, the least `key` first, and of equal ones the earliest; rows
    whose key is None are left out. Reads the whole file."""
    rows = map(json.loads, rows_of(path, 0, NO_LIMIT))
    keyed = ((value, row) for row in rows if (value := key(row)) is not None)
    return [row for _, row in heapq.nsmallest(most, keyed, key=itemgetter(0))]


def identity_of(line: bytes) -> tuple[int, ...] | None:
    """(step, prompt index, sample index) of a row of completions or tokens; else None."""
    match = IDENTITY.match(line)
    return tuple(map(int, match.groups())) if match else None


def _seek(file: BinaryIO, step: int) -> None:
    """Move to the first row of `step` or later, or at most `NEAR` bytes and one line before it."""
    # Invariant: rows from `high` on have at least `step`, rows before `low` have less.
    low, high = 0, file.seek(0, os.SEEK_END)
    while high - low > NEAR:
        middle = (low + high) // 2
        row = _row_from(file, middle)
        if row is None or row.step >= step:
            high = middle
        else:
            low = row.end
    file.seek(low)


def _row_from(file: BinaryIO, offset: int) -> Row | None:
    """First complete row that begins at `offset` or later."""
    # One byte before: if it is a newline, `readline` skips only this byte, and the row at `offset`
    # is found; else `readline` skips the rest of a line.
    file.seek(max(offset - 1, 0))
    start = offset - 1 + len(file.readline()) if offset else 0
    while (line := file.readline()).endswith(b"\n"):
        if (step := _step_of(line)) is not None:
            return Row(start, start + len(line), step)
        start += len(line)
    return None


def _step_of(line: bytes) -> int | None:
    match = STEP.search(line, 0, HEAD_BYTES)
    return int(match[1]) if match else None
