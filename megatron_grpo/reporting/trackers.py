"""Trackers for metrics and tables of completions: wandb, TensorBoard, trackio, SwanLab."""

import os
import re
import secrets
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_grpo.config.config import Config
from megatron_grpo.config.trackers import SwanlabConfig, TrackioConfig, WandbConfig
from megatron_grpo.launch.run_dir import write_whole
from megatron_grpo.reporting.tracking import Tracker

WANDB_ID_FILE = "wandb_id"
"""File with the id of the run at wandb and SwanLab."""
TENSORBOARD_DIR = "tensorboard"
SWANLAB_DIR = "swanlog"
REFUSAL = re.compile(r"\berror 4\d\d\b")
"""Matches wandb's errors for a refused key or project, in contrast to a lost connection."""
FINISH_SECONDS = 300.0
"""Limit for wandb's upload at the end of a run: the job still holds its GPUs."""


def open_trackers(cfg: Config, first_step: int) -> list[Tracker]:
    """Open the trackers of `cfg`; the run continues after `first_step` steps."""
    run_dir, config = cfg.train.run_dir, cfg.model_dump(mode="json")
    opening: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoardRun(run_dir, first_step),
        "wandb": lambda: WandbRun(run_dir, cfg.wandb, config),
        "trackio": lambda: TrackioRun(run_dir, first_step, cfg.trackio, config),
        "swanlab": lambda: SwanlabRun(run_dir, cfg.swanlab, config),
    }
    return [opening[package]() for package in cfg.trackers]


class _Run:
    """Run of a tracker's package; the first completions of a step are sent as a table."""

    _run: Any
    _num_completions: int

    def log(
        self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]]
    ) -> None:
        record: dict[str, Any] = dict(metrics)
        columns, rows = _table(completions[: self._num_completions])
        if rows:
            record["completions"] = self._made_table(columns, rows)
        self._send(step, record)

    def close(self) -> None:
        """Flush and end the run."""
        self._run.finish()

    def _made_table(self, columns: list[str], rows: list[list[Any]]) -> Any:
        raise NotImplementedError

    def _send(self, step: int, record: dict[str, Any]) -> None:
        self._run.log(record, step=step)


class WandbRun(_Run):
    """A wandb run in the run directory; a resumed run continues it by its id. Without an API key,
    or when wandb cannot be reached, it is offline, with a message."""

    def __init__(self, run_dir: Path, cfg: WandbConfig, config: dict[str, Any]) -> None:
        import wandb  # noqa: PLC0415 - an extra that only runs with wandb.project need

        self._wandb, self._num_completions = wandb, cfg.num_completions
        mode_is_chosen = "WANDB_API_KEY" in os.environ or "WANDB_MODE" in os.environ
        init = partial(
            wandb.init,
            project=cfg.project,
            name=cfg.name,
            entity=cfg.entity,
            group=cfg.group,
            tags=cfg.tags,
            id=_run_id(run_dir),
            resume="allow",
            dir=run_dir,
            config=config,
            settings=wandb.Settings(
                console="off",
                silent=True,
                finish_timeout=float(os.environ.get("WANDB_FINISH_TIMEOUT", FINISH_SECONDS)),
            ),
        )
        if not mode_is_chosen:
            print(
                "wandb: WANDB_API_KEY is not set, so the run is recorded offline; "
                f"`wandb sync {run_dir / 'wandb' / 'offline-run-*'}` uploads it",
                file=sys.stderr,
            )
        try:
            self._run = init(mode=None if mode_is_chosen else "offline")
        except wandb.errors.CommError as error:
            if REFUSAL.search(str(error)) or isinstance(error, wandb.errors.AuthenticationError):
                raise
            print(
                f"wandb cannot be reached: {error}\n"
                f"the run continues offline; `wandb sync` uploads {run_dir / 'wandb'} later",
                file=sys.stderr,
            )
            wandb.teardown()  # else the second `init` would find the id in use
            self._run = init(mode="offline")
        # Curves over our own `step`: wandb's counter rejects steps that a resumed run repeats.
        self._run.define_metric("*", step_metric="step")

    def _made_table(self, columns: list[str], rows: list[list[Any]]) -> Any:
        return self._wandb.Table(columns=columns, data=rows)

    def _send(self, step: int, record: dict[str, Any]) -> None:
        self._run.log({"step": step, **record})


class TensorBoardRun:
    """Metrics as TensorBoard's event files in the run directory. The file of a resumed run hides
    earlier values of the steps that it repeats."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra, like wandb

        purged = first_step + 1 if first_step else 0
        self._writer = SummaryWriter(str(run_dir / TENSORBOARD_DIR), purge_step=purged)

    def log(
        self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write the metrics of a step to disk; TensorBoard gets no completions."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class TrackioRun(_Run):
    """A run in trackio's database, or on the server in its environment variables. A resumed run
    continues the last run of its name; steps that it repeats appear twice."""

    def __init__(
        self, run_dir: Path, first_step: int, cfg: TrackioConfig, config: dict[str, Any]
    ) -> None:
        import trackio  # noqa: PLC0415 - only runs with trackio.project need it

        self._trackio, self._num_completions = trackio, cfg.num_completions
        self._run = trackio.init(
            project=cfg.project,
            name=cfg.name or run_dir.resolve().name,
            resume="allow" if first_step else "never",
            config=config,
        )

    def _made_table(self, columns: list[str], rows: list[list[Any]]) -> Any:
        return self._trackio.Table(columns=columns, data=rows)


class SwanlabRun(_Run):
    """A SwanLab run in the run directory; a resumed run continues it by its id. Without an API key
    it is offline; if SwanLab cannot be reached, its error ends the run."""

    def __init__(self, run_dir: Path, cfg: SwanlabConfig, config: dict[str, Any]) -> None:
        import swanlab  # noqa: PLC0415 - only runs with swanlab.project need it

        self._swanlab, self._num_completions = swanlab, cfg.num_completions
        mode_is_chosen = "SWANLAB_API_KEY" in os.environ or "SWANLAB_MODE" in os.environ
        if not mode_is_chosen:
            print(
                "swanlab: SWANLAB_API_KEY is not set, so the run is recorded offline",
                file=sys.stderr,
            )
        on_interrupt = signal.getsignal(signal.SIGINT)
        self._run = swanlab.init(
            project=cfg.project,
            name=cfg.name,
            workspace=cfg.workspace,
            id=_run_id(run_dir),
            resume="allow",
            mode=None if mode_is_chosen else "offline",
            log_dir=str(run_dir / SWANLAB_DIR),
            config=config,
            settings=swanlab.Settings(
                interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none")
            ),
        )
        # `init` installs a handler that would end the run at SwanLab before the trainer ends.
        signal.signal(signal.SIGINT, on_interrupt)

    def _made_table(self, columns: list[str], rows: list[list[Any]]) -> Any:
        return self._swanlab.echarts.Table().add(columns, rows)


def _run_id(run_dir: Path) -> str:
    file = run_dir / WANDB_ID_FILE
    if not file.exists():
        write_whole(file, secrets.token_hex(4))
    return file.read_text(encoding="utf-8")


def _table(completions: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """(columns, rows) of a table; reward functions of other sources are None in a row."""
    flat = [
        {name: value for name, value in row.items() if not isinstance(value, dict | list)}
        | {f"reward/{name}": value for name, value in row["rewards"].items()}
        for row in completions
    ]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    return columns, [[row.get(name) for name in columns] for row in flat]
