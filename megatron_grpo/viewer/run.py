"""Answers to the page about a run directory; every answer is read from disk, nothing is cached."""

import json
import math
from collections.abc import Iterable
from inspect import signature
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from megatron_grpo.reporting.rows import (
    NO_LIMIT,
    identity_of,
    least_rows,
    row_with,
    rows_of,
    rows_since,
    steps_of_prompt,
)
from megatron_grpo.reporting.run import Run
from megatron_grpo.reporting.tracking import (
    COMPLETIONS_FILE,
    CONFIG_FILE,
    EVAL_COMPLETIONS_FILE,
    METRICS_FILE,
    TOKENS_FILE,
    last_record,
)
from megatron_grpo.timing import TIMELINE_FILE

FOUND_ROWS = 500
"""Limit for a search in all steps."""


class RunFiles:
    """The files of a run directory. Every answer is JSON."""

    QUESTIONS = (
        "config",
        "metrics",
        "completions",
        "eval_completions",
        "found",
        "token_keys",
        "tokens",
        "steps_of_prompt",
        "timeline",
    )
    """The methods that a page may call."""

    def __init__(self, run_dir: Path) -> None:
        Run(run_dir).file(METRICS_FILE)  # it must have one
        self.run_dir = run_dir

    def answer(self, question: str, arguments: dict[str, str]) -> bytes | None:
        """Call the method `question`; None if there is no such question with these arguments."""
        if question not in self.QUESTIONS:
            return None
        method = getattr(self, question)
        parameters = signature(method).parameters
        if arguments.keys() != parameters.keys():
            return None
        try:
            values = {name: parameters[name].annotation(text) for name, text in arguments.items()}
        except ValueError:
            return None
        answer: bytes = method(**values)
        return answer

    def summary(self) -> dict[str, Any]:
        """Step and reward of the last record, and when it was written, in seconds since 1970."""
        record, changed = last_record(self.run_dir), (self.run_dir / METRICS_FILE).stat().st_mtime
        return {"step": record["step"], "reward": record.get("reward"), "changed": changed}

    def config(self) -> bytes:
        """The config as nested tables, with the values of the file."""
        path = self.run_dir / CONFIG_FILE
        table: Any = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
        return json.dumps(table, default=str).encode()

    def metrics(self, offset: int, step: int) -> bytes:
        """Records from the last known one, at `offset` and of `step`; see `rows_since`."""
        offset, rows, starts_again = rows_since(self.run_dir / METRICS_FILE, offset, step)
        head = json.dumps({"offset": offset, "starts_again": starts_again})
        return head[:-1].encode() + b', "records": ' + array(rows) + b"}"

    def completions(self, step: int) -> bytes:
        return array(rows_of(self.run_dir / COMPLETIONS_FILE, step, step))

    def eval_completions(self, step: int) -> bytes:
        return array(rows_of(self.run_dir / EVAL_COMPLETIONS_FILE, step, step))

    def found(self, is_eval: int, field: str, sign: int, text: str, least: float) -> bytes:
        """JSON list of completions of all steps that contain `text` and have at least the reward
        `least`: with the least or largest (`sign` -1) `field` first, then by step. The field of one
        reward function is `rewards/NAME`."""
        name = field.removeprefix("rewards/")

        def key(row: dict[str, Any]) -> float | None:
            reward, value = row["reward"], (row if name == field else row["rewards"]).get(name)
            if (-math.inf if reward is None else reward) < least:
                return None
            if text.lower() not in f"{row['prompt']}\n{row['completion']}".lower():
                return None
            return math.inf if value is None else sign * value

        path = self.run_dir / (EVAL_COMPLETIONS_FILE if is_eval else COMPLETIONS_FILE)
        return json.dumps(least_rows(path, FOUND_ROWS, key)).encode()

    def token_keys(self, step: int) -> bytes:
        """JSON list of (prompt_index, sample_index) of the completions with tokens in a step."""
        rows = rows_of(self.run_dir / TOKENS_FILE, step, step)
        return json.dumps([key[1:] for row in rows if (key := identity_of(row))]).encode()

    def tokens(self, step: int, prompt_index: int, sample_index: int) -> bytes:
        identity = (step, prompt_index, sample_index)
        return row_with(self.run_dir / TOKENS_FILE, identity) or b"null"

    def steps_of_prompt(self, prompt_index: int) -> bytes:
        return json.dumps(steps_of_prompt(self.run_dir / COMPLETIONS_FILE, prompt_index)).encode()

    def timeline(self, first: int, last: int) -> bytes:
        """Metadata events (`"ph": "M"`, the names of the timeline's rows), then the events of steps
        `first` to `last`."""
        path = self.run_dir / TIMELINE_FILE
        names = takewhile(lambda event: b'"ph": "M"' in event, rows_of(path, 0, NO_LIMIT))
        events = rows_of(path, first, last)
        return array([*names, *(event for event in events if b'"ph": "M"' not in event)])


def array(objects: Iterable[bytes]) -> bytes:
    """Join encoded JSON objects to a JSON array."""
    return b"[" + b",".join(objects) + b"]"


def runs_in(paths: Iterable[Path]) -> list[Path]:
    """Run directories: `paths`, and in place of a folder of runs the runs in it, newest first."""

    def runs(path: Path) -> list[Path]:
        files = [] if (path / METRICS_FILE).exists() else [*path.glob(f"*/{METRICS_FILE}")]
        files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
        return [file.parent for file in files] or [path]

    return [run for path in paths for run in runs(path)]


def run_names(run_dirs: list[Path]) -> list[str]:
    """Names of runs for the page: folder names if they are distinct, else paths."""
    names = [run_dir.resolve().name for run_dir in run_dirs]
    return names if len(set(names)) == len(names) else [str(run_dir) for run_dir in run_dirs]
