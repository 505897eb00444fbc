"""Live output of a run: one line per step, and a progress bar on a terminal."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from megatron_grpo.bars import Show, Wait, progress_bar
from megatron_grpo.evaluation.evaluation import metrics_of
from megatron_grpo.timing import is_in_background
from parallel.words import counted

SHOWN_SECONDS = 0.05
"""Shorter phases are left out: they would print as 0.0."""


class EvaluationBar:
    """Progress of an evaluation: a task in the bar, or occasional lines without a bar."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._wait: Wait | None = None

    def show(self, name: str, num_done: int, num_prompts: int) -> None:
        """Show the number of finished prompts of the set `name`; the last call has all."""
        self._wait = self._wait or Wait(self._bar, evaluation_title(name), "prompts")
        self._wait.show(num_done, num_prompts)
        if num_done == num_prompts:
            self._wait.close()
            self._wait = None


class ProgressBar:
    """Rank 0's terminal output; without a terminal, plain lines and no bar."""

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
            self.tell(line, soft_wrap=False)
            self._bar.update(self._task, completed=step)
        else:
            # One line of any width, for log files and grep.
            self.tell(f"{line}: {phases}")

    def show_evaluation(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
        width = len(str(self._num_steps))
        self.tell(f"step {step:>{width}}/{self._num_steps}  {evaluation_line(name, metrics)}")

    def show_completions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._console.print(completions_by_prompt(rows))

    def tell(self, line: str, *, soft_wrap: bool = True) -> None:
        # Without markup and emoji: paths and names may contain brackets and colons.
        self._console.print(line, soft_wrap=soft_wrap, markup=False, emoji=False)

    def enter(self, phase: str) -> None:
        """Show `phase` and its duration until the next call."""
        self._bar.update(self._task, description=phase, since=time.monotonic() if phase else None)

    @contextmanager
    def waiting(self, what: str, unit: str) -> Iterator[Show]:
        """Show the progress of a wait for `what`, counted in `unit`; print its duration."""
        began, wait = time.monotonic(), Wait(self._bar, what, unit)
        if not self._console.is_terminal:
            self.tell(f"{what} ...")
        yield wait.show
        wait.close()
        self.tell(f"{what}: {time.monotonic() - began:.0f} s")

    def close(self) -> None:
        self._bar.stop()


def step_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """Key metrics of a step in one line. Parts of the reward are shown if there are several, shares
    of groups with equal rewards and of cut completions unless they are 0."""
    shortest, longest = metrics["completions/min_length"], metrics["completions/max_length"]
    parts = {
        name.removeprefix("reward/").removesuffix("/mean"): value
        for name, value in metrics.items()
        if name.startswith("reward/") and name.endswith("/mean")
    }
    shares = ", ".join(f"{name} {value:.3f}" for name, value in parts.items())
    equal = metrics.get("frac_reward_zero_std", 0.0)
    cut = metrics.get("completions/clipped_ratio", 0.0)
    return "  ".join(
        [
            f"step {step:>{len(str(num_steps))}}/{num_steps}",
            f"reward {metrics['reward']:.3f} ± {metrics['reward_std']:.3f}"
            if "reward" in metrics
            else "no reward: all failed",
            *([f"({shares})"] if len(parts) > 1 else []),
            *([f"{equal:.0%} of groups equal"] if equal else []),
            *([f"kl {metrics['kl']:.4f}"] if "kl" in metrics else []),
            f"length {metrics['completions/mean_length']:.1f} ({shortest:.0f}-{longest:.0f})",
            *([f"{cut:.0%} cut"] if cut else []),
            f"{metrics['tokens_per_second']:.0f} tokens/s",
            f"{metrics['time/step']:.1f} s",
            *(["skipped"] if metrics["skipped_steps"] else []),
        ]
    )


def completions_by_prompt(rows: Sequence[Mapping[str, Any]]) -> Group:
    """Prompts of rows of training or of an evaluation, each with its `answer` in the data above a
    table of its completions."""
    by_prompt: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_prompt[row.get("set"), row["prompt_index"], row["prompt"]].append(row)
    return Group(*(part for own in by_prompt.values() for part in _of_prompt(own)))


def _of_prompt(rows: Sequence[Mapping[str, Any]]) -> tuple[Text, Table]:
    first = rows[0]
    step = f"step {first['step']}, " if "step" in first else ""
    chat = [f"{message['role']}: {message['content']}" for message in first.get("messages", ())]
    head = [f"{step}prompt {first['prompt_index']}", *(chat or [first["prompt"]])]
    if (answer := first["columns"].get("answer")) is not None:
        head.append(f"answer: {answer}")
    table = Table(show_lines=True)
    table.add_column("completion", overflow="fold", ratio=1)
    names, values = list(first["rewards"]), [n for n in ("reward", "advantage") if n in first]
    for column in [*names, *values, "end"]:
        table.add_column(Text(column), justify="right", no_wrap=True)
    for row in rows:
        numbers = [*(row["rewards"][name] for name in names), *(row[name] for name in values)]
        table.add_row(_as_it_is(row["completion"]), *map(_shown, numbers), row["finish_reason"])
    return _as_it_is("\n".join(head)), table


def _shown(score: float | None) -> str:
    return "failed" if score is None else f"{score:.3f}"


def _as_it_is(text: str) -> Text:
    """Text of a model without effect on the terminal: no markup and no escape sequences."""
    return Text(text.replace("\x1b", "␛"))


def evaluation_title(name: str) -> str:
    return f"evaluation of {name}" if name else "evaluation"


def evaluation_line(name: str, metrics: Mapping[str, float]) -> str:
    """Line with pass@k, mean@n and the number of prompts of the set `name`."""
    own = metrics_of(name, metrics)
    failed = own["failed"]
    return "  ".join(
        [
            evaluation_title(name),
            *(f"{metric} {value:.3f}" for metric, value in own.items() if "@" in metric),
            counted(int(own["num_prompts"]), "prompt"),
            *([f"{counted(int(failed), 'completion')} without a score"] if failed else []),
        ]
    )


def phase_line(metrics: Mapping[str, float]) -> str:
    """Seconds per phase in execution order, without phases in the background."""
    phases = [
        f"{name.removeprefix('time/')} {seconds:.1f}"
        for name, seconds in metrics.items()
        if name.startswith("time/") and name != "time/step" and seconds >= SHOWN_SECONDS
        if not is_in_background(name, metrics)
    ]
    return ", ".join(phases)
