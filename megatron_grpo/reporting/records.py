"""Reads the records of one step from a file of JSON lines, however large the file is."""

import json
import os
from pathlib import Path
from typing import Any, BinaryIO


def rows_of_step(path: Path, step: int) -> list[dict[str, Any]]:
    """The rows of `step` in a file whose rows have ascending steps; none if there is no such file.

    Finds them by bisection: of the rest of the file, only some forty lines are read. A last line
    without a newline is being written, and is left out.
    """
    if not path.exists():
        return []
    rows = []
    with path.open("rb") as file:
        file.seek(_first_line(file, step))
        for line in file:
            if not line.endswith(b"\n"):
                break
            row = json.loads(line)
            if row["step"] != step:
                break
            rows.append(row)
    return rows


def _first_line(file: BinaryIO, step: int) -> int:
    """Where the first line of at least `step` begins; the end of the file if there is none."""
    low, high = 0, file.seek(0, os.SEEK_END)
    while low < high:  # the line is the first to begin at or after `low`, and no later than `high`
        middle = (low + high) // 2
        begin, line = _line_from(file, middle)
        if not line.endswith(b"\n") or json.loads(line)["step"] >= step:
            high = middle
        else:
            low = begin + len(line)
    return _line_from(file, low)[0]


def _line_from(file: BinaryIO, offset: int) -> tuple[int, bytes]:
    """The first line that begins at or after `offset`, and where it begins."""
    if offset:
        file.seek(offset - 1)
        offset += len(file.readline()) - 1
    file.seek(offset)
    return offset, file.readline()
