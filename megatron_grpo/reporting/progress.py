"""Live output of a run: one line per step and, on a terminal, a progress bar below."""

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from megatron_grpo.evaluation.evaluation import metrics_of
from megatron_grpo.timing import is_beside

SHOWN_SECONDS = 0.05
"""Shorter phases would print as 0.0 and are left out."""

LINE_SECONDS = 30.0
"""Interval between lines about an evaluation if there is no bar."""


def progress_bar(console: Console) -> Progress:
    """A bar per task; disabled if `console` is not a terminal."""
    return Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", style="dim", table_column=Column(ratio=1, no_wrap=True)),
        console=console,
        disable=not console.is_terminal,
        expand=True,
    )


class EvaluationBar:
    """Progress of an evaluation: a task in the bar, or occasional lines if the bar is disabled."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task: TaskID | None = None
        self._last_line = 0.0

    def show(self, name: str, num_done: int, num_prompts: int) -> None:
        """Show the finished prompts of the set `name`: none in the first call, all in the last."""
        now, what = time.monotonic(), evaluation_title(name)
        if self._task is None:
            self._task, self._last_line = self._bar.add_task(what, total=num_prompts), now
        self._bar.update(self._task, completed=num_done)
        if num_done == num_prompts:
            self._bar.remove_task(self._task)
            self._task = None
        elif self._bar.disable and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            self._bar.console.print(f"{what}: {num_done} of {num_prompts} prompts")


class ProgressBar:
    """Rank 0's view of the run. If stdout is not a terminal, plain lines without a bar."""

    def __init__(self, first_step: int, num_steps: int, console: Console | None = None) -> None:
        self._console = console or Console()
        self._num_steps = num_steps
        self._bar = progress_bar(self._console)
        self._task = self._bar.add_task("", total=num_steps, completed=first_step)
        self.evaluation = EvaluationBar(self._bar)
        self._bar.start()

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a finished step (counted from 1) and update the bar."""
        line, phases = step_line(step, self._num_steps, metrics), phase_line(metrics)
        if self._console.is_terminal:
            self._console.print(line)
            self._bar.update(self._task, completed=step, description=phases)
        else:
            # For log files and grep: everything in one line, whatever its width.
            self._console.print(f"{line}: {phases}", soft_wrap=True)

    def show_evaluation(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
        """Print the line of the evaluation of the set `name` after `step`."""
        width = len(str(self._num_steps))
        line = f"step {step:>{width}}/{self._num_steps}  {evaluation_line(name, metrics)}"
        self._console.print(line, soft_wrap=True)

    def close(self) -> None:
        """Stop the bar, leaving its last state on the terminal."""
        self._bar.stop()


def step_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """The key metrics of a step in one line.

    Reads `reward`, `reward_std`, `completions/{mean,min,max}_length`, `tokens_per_second`,
    `time/step`, `skipped_steps` and, if the loss has one, `kl`.
    """
    kl = [f"kl {metrics['kl']:.4f}"] if "kl" in metrics else []
    shortest, longest = (metrics[f"completions/{end}_length"] for end in ("min", "max"))
    return "  ".join(
        [
            f"step {step:>{len(str(num_steps))}}/{num_steps}",
            f"reward {metrics['reward']:.3f} ± {metrics['reward_std']:.3f}",
            *kl,
            f"length {metrics['completions/mean_length']:.1f} ({shortest:.0f}-{longest:.0f})",
            f"{metrics['tokens_per_second']:.0f} tokens/s",
            f"{metrics['time/step']:.1f} s",
            *(["skipped"] if metrics["skipped_steps"] else []),
        ]
    )


def evaluation_title(name: str) -> str:
    """How lines and bars call the evaluation of the held-out set `name`."""
    return f"evaluation of {name}" if name else "evaluation"


def evaluation_line(name: str, metrics: Mapping[str, float]) -> str:
    """pass@k, mean@n and the number of prompts of the set `name`, of `eval_metrics`."""
    own = metrics_of(name, metrics)
    failed = own["failed"]
    return "  ".join(
        [
            evaluation_title(name),
            *(f"{metric} {value:.3f}" for metric, value in own.items() if "@" in metric),
            f"{own['num_prompts']:.0f} prompts",
            *([f"{failed:.0f} completions without a score"] if failed else []),
        ]
    )


def phase_line(metrics: Mapping[str, float]) -> str:
    """Seconds per phase, in execution order, without phases that ran concurrently with the step."""
    return ", ".join(
        f"{name.removeprefix('time/')} {seconds:.1f}"
        for name, seconds in metrics.items()
        if name.startswith("time/") and name != "time/step" and seconds >= SHOWN_SECONDS
        if not is_beside(name, metrics)
    )
