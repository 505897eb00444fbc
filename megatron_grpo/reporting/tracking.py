"""The records of a run, in files of JSON lines; `trackers.py` sends them elsewhere."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from megatron_grpo.launch.run_dir import write_whole

METRICS_FILE = "metrics.jsonl"
COMPLETIONS_FILE = "completions.jsonl"
TOKENS_FILE = "tokens.jsonl"
EVAL_COMPLETIONS_FILE = "eval_completions.jsonl"
REPLACED_FILE = "replaced_completions.jsonl"
RECORDS = (METRICS_FILE, COMPLETIONS_FILE, TOKENS_FILE, EVAL_COMPLETIONS_FILE, REPLACED_FILE)
"""Files of JSON lines with ascending steps."""
UNKNOWN = {"kl": None, "loss": None, "grad_norm": None}
"""Keys that scripts may rely on: without a reference model there is no KL, and a skipped step has
no gradient norm and perhaps no loss."""
BLOCK_BYTES = 2**20


class Tracker(Protocol):
    """Destination of metrics besides the run directory, perhaps with completions in a table."""

    def log(
        self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]]
    ) -> None:
        """Send metrics of a step, and rows of `completion_rows`; some of a step come later."""

    def close(self) -> None:
        """Send what is left, and end the run."""


class Tracking:
    """The records of one run; those after `first_step`, that of the loaded checkpoint, come from
    lost work and are dropped, all without a checkpoint."""

    def __init__(self, run_dir: Path, first_step: int, trackers: Sequence[Tracker] = ()) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        for name in RECORDS:
            drop_records_after(run_dir / name, first_step or -1)
        for name in (METRICS_FILE, COMPLETIONS_FILE, TOKENS_FILE):
            (run_dir / name).touch()  # for those who look into a run before its first step
        self._run_dir = run_dir
        self._trackers = trackers

    def log(
        self,
        step: int,
        metrics: Mapping[str, float],
        completions: Sequence[Mapping[str, Any]],
        tokens: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Record a finished optimizer step (counted from 1), with rows of `completion_rows` and
        `token_rows`. Raises ValueError naming the metrics that are not finite."""
        _check_finite(step, metrics)
        append_rows(self._run_dir / COMPLETIONS_FILE, completions)
        append_rows(self._run_dir / TOKENS_FILE, tokens)
        append_rows(self._run_dir / METRICS_FILE, [{"step": step, **UNKNOWN, **metrics}])
        for tracker in self._trackers:
            tracker.log(step, metrics, completions)

    def log_replaced(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record completions that dynamic sampling replaced, before the step that is in `rows`."""
        append_rows(self._run_dir / REPLACED_FILE, rows)

    def log_evaluated(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record the completions of the evaluation after `step`, replacing earlier ones of it."""
        file = self._run_dir / EVAL_COMPLETIONS_FILE
        drop_records_after(file, step - 1)
        append_rows(file, [{"step": step, **row} for row in rows])

    def has_metrics(self, step: int, names: Iterable[str]) -> bool:
        """Whether the last record is of `step` and contains these metrics."""
        with (self._run_dir / METRICS_FILE).open("rb") as file:
            last = next((json.loads(line) for _, line in _lines_backwards(file)), {"step": None})
        return last["step"] == step and last.keys() >= set(names)

    def amend(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the last record if it is of `step`, else to a new record."""
        _check_finite(step, metrics)
        path = self._run_dir / METRICS_FILE
        lines = path.read_text(encoding="utf-8").splitlines()
        is_there = bool(lines) and json.loads(lines[-1])["step"] == step
        record = json.loads(lines.pop()) if is_there else {"step": step, **UNKNOWN}
        lines.append(json.dumps({**record, **metrics}))
        write_whole(path, "".join(f"{line}\n" for line in lines))
        for tracker in self._trackers:
            tracker.log(step, metrics, [])

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append lines of JSON; raises OSError that names the file, as that of a write does not."""
    try:
        with path.open("ab") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _check_finite(step: int, metrics: Mapping[str, float]) -> None:
    broken = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    if broken:
        raise ValueError(f"step {step}: metrics are not finite: {broken}")


def last_step(run_dir: Path) -> int:
    """The step of the last complete record of a run; 0 if there is none."""
    path = run_dir / METRICS_FILE
    if not path.exists():
        return 0
    with path.open("rb") as file:
        steps = (_step_of(line) for _, line in _lines_backwards(file))
        return next((int(step) for step in steps if step < math.inf), 0)


def drop_records_after(path: Path, step: int) -> None:
    """Truncate a JSON-lines file with ascending steps after its last complete record up to `step`.

    Lines that a death has cut or a host's crash damaged go, too. Only the part to drop is read:
    after weeks, a run has gigabytes of completions.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        kept = (end for end, line in _lines_backwards(file) if _step_of(line) <= step)
        num_bytes = next(kept, 0)
    os.truncate(path, num_bytes)


def _step_of(line: bytes) -> float:
    """The step of a record; infinity if the line is damaged, such as the zeros of a lost block."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


def _lines_backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The complete lines of a file, last one first, each with the offset of its end."""
    start, unread = file.seek(0, os.SEEK_END), b""
    while start:
        end = start + len(unread)
        size = min(BLOCK_BYTES, start)
        start = file.seek(start - size)
        first, newline, lines = (file.read(size) + unread).partition(b"\n")
        if start:  # the first line begins in an earlier block
            unread = first + newline
        else:
            lines = first + newline + lines
        for line in reversed(lines.splitlines(keepends=True)):
            if line.endswith(b"\n"):
                yield end, line
            end -= len(line)
