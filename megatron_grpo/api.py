"""Runs from Python, in a script or a notebook: what the commands do, with data as the result.

Overrides are keyword arguments, dotted or nested: `**{"grpo.beta": 0.04}` or
`grpo={"beta": 0.04}`. docs/python.ipynb has a tour.
"""

import os
import sys
import tempfile
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from signal import SIGINT
from subprocess import PIPE
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any, Literal

from megatron_grpo.config.config import Config
from megatron_grpo.config.file import as_overrides, dump_config, with_overrides
from megatron_grpo.config.file import load_config as load_with
from megatron_grpo.launch.process import (
    EXIT_PREEMPTED,
    allow_open_files,
    silence_libraries,
    when_preempted,
)
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE, take_token
from megatron_grpo.reporting.run import Run
from megatron_grpo.workers.child_process import ChildProcess

if TYPE_CHECKING:
    from megatron_grpo.planning.command import Plan
    from megatron_grpo.prompt_checks import Checked

NUM_LINES_KEPT = 30
MESSAGE = "megatron-grpo: "
"""Beginning of the last message of a command that failed."""


@dataclass(frozen=True)
class Report:
    """End of a run that has not failed: `state`, `run_dir`, `steps`, `metrics` and `model`."""

    state: Literal["complete", "preempted"]
    """`preempted`: SIGTERM or SIGUSR1 has stopped it, and the same call resumes it."""
    run_dir: Path
    """`Run(report.run_dir)` reads its metrics and completions."""
    steps: int
    """Optimizer steps done, with those of earlier starts."""
    metrics: dict[str, Any] = field(repr=False)
    """The last step's, and those of the evaluation after it; empty before the first step."""
    model: Path | None
    """Folder of the exported model, or with LoRA of the adapter; None if there is none yet."""


def load_config(path: str | Path, **overrides: Any) -> Config:
    """Read a YAML config with overrides, as the commands do.

        cfg = load_config("configs/learn_tiny.yaml", train={"num_steps": 20})

    Raises ValueError, one line per mistake.
    """
    return load_with(Path(path), as_overrides(overrides))


def train(cfg: Config, **overrides: Any) -> Report:
    """Run `megatron-grpo train` on this host; returns when the run has ended.

    Its output is printed. A run directory that has checkpoints is resumed: each run of a sweep
    needs its own.

        for lr in (1e-6, 3e-6):
            report = train(cfg, optimizer={"lr": lr}, train={"run_dir": f"runs/lr_{lr}"})
            if report.state == "preempted":
                break

    Raises ValueError for a mistake found before the first step, and RuntimeError for a later
    failure, with the run's last message. KeyboardInterrupt ends the run, as Ctrl-C does.
    """
    cfg = with_overrides(cfg, as_overrides(overrides))
    with tempfile.TemporaryDirectory(prefix="megatron_grpo_") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(dump_config(cfg), encoding="utf-8")
        code, lines = _run_command("train", str(path))
    if code not in (0, EXIT_PREEMPTED):
        message = "".join(lines).rpartition(MESSAGE)[2].strip()
        raise (ValueError if code == 2 else RuntimeError)(message)
    run, model = Run(cfg.train.run_dir), cfg.train.run_dir / "hf"
    records = (
        run.metrics() if run.last_step else []
    )  # none of a run preempted before its first step
    return Report(
        state="preempted" if code else "complete",
        run_dir=run.run_dir,
        steps=run.last_step,
        metrics=records[-1] if records else {},
        model=model if model.exists() else None,
    )


def _run_command(*arguments: str) -> tuple[int, deque[str]]:
    """Run a command in a process that cannot outlive this one, and print its output; returns its
    exit code and last lines."""
    # TTY_COMPATIBLE: a notebook's kernel claims a terminal, where progress bars would move. TMPDIR:
    # compiled kernels stay for the next run.
    environment = {**os.environ, "TTY_COMPATIBLE": "0"}
    command = ["env", f"TMPDIR={tempfile.gettempdir()}", sys.executable, "-m", "megatron_grpo"]
    child = ChildProcess.start([*command, *arguments], environment, PIPE)
    process, last = child.process, deque[str](maxlen=NUM_LINES_KEPT)
    assert process.stdout
    output = TextIOWrapper(process.stdout, "utf-8", errors="replace")
    with ExitStack() as stack:
        stack.callback(child.kill)
        stack.enter_context(output)
        if current_thread() is main_thread():  # elsewhere Python takes no handlers
            stack.enter_context(when_preempted(lambda number, _: process.send_signal(number)))
        try:
            _print_all(output, last)
        except KeyboardInterrupt:
            process.send_signal(SIGINT)
            _print_all(output, last)
            raise
        return process.wait(), last


def _print_all(output: TextIOWrapper, last: deque[str]) -> None:
    for line in output:
        print(line, end="", flush=True)
        last.append(line)


def check(cfg: Config, **overrides: Any) -> "Checked":
    """Check that a run can start, as `megatron-grpo check` does; the result prints as there.

    Raises ValueError for the first mistake in model, data, rewards or run directory.
    """
    cfg = with_overrides(cfg, as_overrides(overrides))
    allow_open_files()
    silence_libraries()
    from megatron_grpo.preflight import preflight

    token = take_token(os.environ)  # the code of users that is tried does not get it
    try:
        return preflight(cfg, token, starts_here=False)
    finally:
        if token is not None:
            os.environ[TOKEN_VARIABLE] = token


def plan(
    cfg: Config,
    *,
    gpu: str = "h100",
    gpus: int | None = None,
    lengths: str | Path | None = None,
    **overrides: Any,
) -> "Plan":
    """Estimate memory, time and traffic, as `megatron-grpo plan` does; the result prints as there.

        plan(cfg, gpu="h200", gpus=16).figures.fits

    Raises ValueError for what cannot be split or placed. `lengths`: see `--lengths`.
    """
    cfg = with_overrides(cfg, as_overrides(overrides))
    cfg.model.check_folder(only_config=True)
    from megatron_grpo.planning.command import plan_config

    return plan_config(cfg, gpu, gpus, None if lengths is None else Path(lengths))
