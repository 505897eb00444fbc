"""Output of a process that goes on when nobody reads it any more."""

import io
import os
import select
import sys
from typing import Any

STDOUT = 1


def outlive_readers() -> None:
    """Make this process go on after its stdout or stderr failed: a closed pipe, or a full disk.

    The signal on which a run saves may also end the `tee` behind it, or the terminal. What cannot
    be printed is lost, but the records of a run are in files.
    """
    for name in ("stdout", "stderr"):
        if stream := getattr(sys, name):  # None: closed when the process was started
            setattr(sys, name, _lasting(stream.fileno()))


class LastingFile(io.FileIO):
    """An open file that becomes /dev/null once it cannot be written."""

    def write(self, data: Any, /) -> int:
        """Write `data`, and return the number of bytes."""
        try:
            while (num_bytes := super().write(data)) is None:  # a non-blocking pipe that is full
                select.select([], [self.fileno()], [])
        except OSError as error:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            if self.fileno() == STDOUT:
                print(f"megatron-grpo: nothing more is printed on stdout: {error}", file=sys.stderr)
            return super().write(data)
        return num_bytes


def _lasting(number: int) -> io.TextIOWrapper:
    raw = LastingFile(number, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), "utf-8", errors="backslashreplace", line_buffering=True
    )
