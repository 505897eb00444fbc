"""Records of a run in files of JSON lines; `trackers.py` sends them elsewhere."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from megatron_grpo.launch.run_dir import write_whole

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
COMPLETIONS_FILE = "completions.jsonl"
TOKENS_FILE = "tokens.jsonl"
EVAL_COMPLETIONS_FILE = "eval_completions.jsonl"
REPLACED_FILE = "replaced_completions.jsonl"
RECORDS = (METRICS_FILE, COMPLETIONS_FILE, TOKENS_FILE, EVAL_COMPLETIONS_FILE, REPLACED_FILE)
"""Files of JSON lines with ascending steps."""
UNKNOWN = {"kl": None, "loss": None, "grad_norm": None}
"""Keys that every record has, for scripts. Runs without a reference model have no KL; a skipped
step has no gradient norm and perhaps no loss."""
BLOCK_BYTES = 2**20


class Tracker(Protocol):
    """Destination of metrics, and perhaps of a table of completions."""

    def log(
        self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]]
    ) -> None:
        """Send metrics of a step, and rows of `completion_rows`. Called again for metrics of an
        evaluation after the step."""

    def close(self) -> None:
        """Send the rest, and end the run."""


class Tracking:
    """Records of a run. Records after `first_step`, the step of the loaded checkpoint, belong to
    lost work and are dropped; without a checkpoint, all are."""

    def __init__(self, run_dir: Path, first_step: int, trackers: Sequence[Tracker] = ()) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        for name in RECORDS:
            drop_records_after(run_dir / name, first_step or -1)
        for name in (METRICS_FILE, COMPLETIONS_FILE, TOKENS_FILE):
            (run_dir / name).touch()  # viewers may open a run before its first step
        self._run_dir = run_dir
        self._trackers = trackers

    def log(
        self,
        step: int,
        metrics: Mapping[str, float],
        completions: Sequence[Mapping[str, Any]],
        tokens: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        """Record a finished optimizer step (counted from 1), with rows of `completion_rows` and
        `token_rows`; returns its record. Raises ValueError with the names of metrics that are not
        finite."""
        _check_finite(step, metrics)
        # Metrics last: a step with a record has its completions and tokens, wherever a run dies.
        append_rows(self._run_dir / COMPLETIONS_FILE, completions)
        append_rows(self._run_dir / TOKENS_FILE, tokens)
        record = {"step": step, **UNKNOWN, **metrics}
        append_rows(self._run_dir / METRICS_FILE, [record])
        for tracker in self._trackers:
            tracker.log(step, metrics, completions)
        return record

    def log_replaced(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record completions that dynamic sampling replaced."""
        append_rows(self._run_dir / REPLACED_FILE, rows)

    def log_evaluated(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record the completions of the evaluation after `step`, in place of earlier ones."""
        file = self._run_dir / EVAL_COMPLETIONS_FILE
        drop_records_after(file, step - 1)
        append_rows(file, [{"step": step, **row} for row in rows])

    def has_metrics(self, step: int, names: Iterable[str]) -> bool:
        """Whether the last record is of `step` and contains these metrics."""
        last = last_record(self._run_dir)
        return last["step"] == step and last.keys() >= set(names)

    def values_of(self, metric: str) -> dict[int, float]:
        """Values of a metric so far, by step."""
        lines = (self._run_dir / METRICS_FILE).read_text(encoding="utf-8").splitlines()
        records = map(json.loads, lines)
        return {each["step"]: each[metric] for each in records if metric in each}

    def amend(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the last record if it is of `step`, else to a new record."""
        _check_finite(step, metrics)
        path = self._run_dir / METRICS_FILE
        lines = path.read_text(encoding="utf-8").splitlines()
        is_there = bool(lines) and json.loads(lines[-1])["step"] == step
        record = json.loads(lines.pop()) if is_there else {"step": step, **UNKNOWN}
        lines.append(json.dumps({**record, **metrics}))
        # Not in place: the record gets longer, and a death must leave the old file or the new one.
        write_whole(path, "".join(f"{line}\n" for line in lines))
        for tracker in self._trackers:
            tracker.log(step, metrics, [])

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append lines of JSON. Raises OSError with the path, which a write's error lacks."""
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


def last_record(run_dir: Path) -> dict[str, Any]:
    """Last complete record of metrics; its step is null without records."""
    with (run_dir / METRICS_FILE).open("rb") as file:
        return next((json.loads(line) for _, line in _lines_backwards(file)), {"step": None})


def last_step(run_dir: Path) -> int:
    """Step of the last complete record of a run; 0 without records."""
    path = run_dir / METRICS_FILE
    if not path.exists():
        return 0
    with path.open("rb") as file:
        steps = (_step_of(line) for _, line in _lines_backwards(file))
        return next((int(step) for step in steps if step < math.inf), 0)


def drop_records_after(path: Path, step: int) -> None:
    """Truncate a file behind its last complete record of at most `step`; cut or damaged lines are
    dropped, too. Reads only the part to drop: completions may be gigabytes."""
    if not path.exists():
        return
    with path.open("rb") as file:
        kept = (end for end, line in _lines_backwards(file) if _step_of(line) <= step)
        num_bytes = next(kept, 0)
    os.truncate(path, num_bytes)


def _step_of(line: bytes) -> float:
    """Step of a record; infinity for a damaged line, such as the zeros of a lost block."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


def _lines_backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(end offset, line) of the complete lines of a file, last line first."""
    start, unread = file.seek(0, os.SEEK_END), b""
    while start:
        end = start + len(unread)
        # As much again of a line that is longer than a block, or its copies would take n^2.
        size = min(max(BLOCK_BYTES, len(unread)), start)
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
