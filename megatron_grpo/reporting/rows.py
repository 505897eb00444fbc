"""Rows of a step in files of gigabytes, found without reading the rest.

Every line is a JSON object with its `step` near the start, in ascending order: the first of a step
is found by bisection over byte offsets, in about 20 reads. A line without a newline is still being
written. Of steps that a resumed run repeats in a timeline, one of the repetitions is found.
"""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

STEP = re.compile(rb'"step": (\d+)')
IDENTITY = re.compile(rb'\{"step": (\d+), "prompt_index": (\d+), "sample_index": (\d+)')
"""Beginning of rows of completions and of tokens."""
HEAD_BYTES = 400
"""Within which a line has its step; a line of the timeline is shorter as a whole."""
NEAR = 2**16
"""Bytes that are sooner read than bisected."""
NO_LIMIT = 2**63


class Row(NamedTuple):
    """A line with a step: its byte offset, the offset behind it, and the step."""

    start: int
    end: int
    step: int


def rows_of(path: Path, first: int, last: int) -> Iterator[bytes]:
    """The JSON objects of the steps `first` to `last`, undecoded; one without a step, as some of
    the timeline, belongs to the step before it, at first 0."""
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
            if step >= first and line.startswith(b"{"):  # not zeros from the crash of a host
                yield line.rstrip(b",\n")


def newest_rows(path: Path, num_bytes: int) -> list[bytes]:
    """The rows of the newest steps that take `num_bytes` at most; at least those of one step."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        while num_bytes < size:
            cut = _row_from(file, size - num_bytes)
            if cut:  # perhaps not the first of its step
                newer = list(rows_of(path, cut.step + 1, NO_LIMIT))
                return newer or list(rows_of(path, cut.step, NO_LIMIT))
            num_bytes *= 2  # the last row is longer
    return list(rows_of(path, 0, NO_LIMIT))


def rows_since(path: Path, offset: int, step: int) -> tuple[int, list[bytes], bool]:
    """The rows from `offset` on, the offset of the last of them, and whether they are all rows.

    The last known row, of `step`, is among them, since metrics may be added to it. If another is
    there, a resumed run has written the file: then all rows are new.
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
    """The steps in which a prompt occurs. This reads the whole file, a line at a time."""
    if not path.exists():
        return []
    steps = set()
    with path.open("rb") as file:
        for line in file:
            if (row := identity_of(line)) and row[1] == prompt_index:
                steps.add(row[0])
    return sorted(steps)


def identity_of(line: bytes) -> tuple[int, ...] | None:
    """Step, prompt and sample of a row of completions or tokens; None of another line."""
    match = IDENTITY.match(line)
    return tuple(map(int, match.groups())) if match else None


def _seek(file: BinaryIO, step: int) -> None:
    """Move to the first line of a step of at least `step`, or less than `NEAR` and a line before.

    The first row from `high` on, if any, is of `step` at least; the last one before `low` is not.
    """
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
    """The first complete row that begins at `offset` or later."""
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
