"""A run as others read it: the files of its folder, on disk, without torch."""

import json
from pathlib import Path
from typing import Any

from megatron_grpo.config.config import Config
from megatron_grpo.config.file import load_config
from megatron_grpo.reporting.rows import rows_of
from megatron_grpo.reporting.tracking import (
    COMPLETIONS_FILE,
    CONFIG_FILE,
    EVAL_COMPLETIONS_FILE,
    METRICS_FILE,
    last_step,
)


class Run:
    """A run's folder, read anew by each call: a run that is running goes on.

        run = Run("runs/math")
        [record["reward"] for record in run.metrics()]    # docs/metrics.md
        run.completions(step=3)[0]["completion"]          # docs/run-directory.md
        run.config.optimizer.lr

    The folder of an evaluation has completions alone, of no step.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = Path(run_dir)

    def __repr__(self) -> str:
        return f"Run({str(self.run_dir)!r})"

    @property
    def config(self) -> Config:
        """The resolved config, of the latest start."""
        return load_config(self.run_dir / CONFIG_FILE)

    @property
    def last_step(self) -> int:
        """The newest step with metrics; 0 before the first."""
        return last_step(self.run_dir)

    def metrics(self) -> list[dict[str, Any]]:
        """A record for each step, with the evaluation after it; ValueError for a damaged line."""
        path, records = self.file(METRICS_FILE), list[dict[str, Any]]()
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                break  # the last line was being written when the run died
            try:
                records.append(json.loads(line))
            except ValueError:
                raise ValueError(
                    f"{path}: line {number} is damaged, perhaps by a host that crashed: remove it"
                ) from None
        return records

    def completions(self, step: int | None = None) -> list[dict[str, Any]]:
        """A row for each completion of `step`, by default the newest. A step that trains again on
        completions of an earlier one has none."""
        path = self.file(COMPLETIONS_FILE, EVAL_COMPLETIONS_FILE)
        step = self.last_step if step is None else step
        return [json.loads(row) for row in rows_of(path, step, step)]

    def file(self, *names: str) -> Path:
        """The first of the files `names` that there is; ValueError without any."""
        for name in names:
            if (path := self.run_dir / name).is_file():
                return path
        raise ValueError(
            f"{self.run_dir} has no {' or '.join(names)}: give the folder of a run (its "
            "train.run_dir)"
        )
