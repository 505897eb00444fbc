"""The commands that look into a run directory; `cli` registers them."""

import json
import math
from pathlib import Path
from typing import Annotated

import typer


def report(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Run directory with a metrics.jsonl.")
    ],
) -> None:
    """Draw RUN_DIR/curves.png from its metrics.

    Plots reward, KL, completion lengths, log-probability gap, gradient norm and time over steps.

    \b
    Example:
      megatron-grpo report runs/demo_smollm2_135m
    """
    from megatron_grpo.reporting.report import draw_curves  # matplotlib: seconds

    print(draw_curves(run_dir))


def show(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Run directory with a completions.jsonl.")
    ],
    step: Annotated[
        int | None, typer.Option(help="Optimizer step. Default: the last one in the log.")
    ] = None,
    worst: Annotated[
        int | None, typer.Option(help="Print so many completions with the lowest rewards.", min=1)
    ] = None,
    best: Annotated[
        int | None, typer.Option(help="Print so many with the highest rewards.", min=1)
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(help="Only those of the prompt in this row of the data.", min=0)
    ] = None,
) -> None:
    """Print completions of a step of RUN_DIR with their rewards.

    Without --worst and --best, prints all of them. A completion whose reward failed counts as the
    worst. A step that trains again on completions of an earlier one has none of its own.

    \b
    Example:
      megatron-grpo show runs/demo_smollm2_135m --step 12 --worst 5
    """
    from rich.console import Console

    from megatron_grpo.reporting.progress import completions_table
    from megatron_grpo.reporting.rows import rows_of
    from megatron_grpo.reporting.tracking import COMPLETIONS_FILE, last_step

    path = run_dir / COMPLETIONS_FILE
    if not path.is_file():
        raise ValueError(f"{run_dir} has no {COMPLETIONS_FILE}: give the train.run_dir of a run")
    step = last_step(run_dir) if step is None else step
    rows = [json.loads(line) for line in rows_of(path, step, step)]
    rows = [row for row in rows if prompt in (None, row["prompt_index"])]
    if not rows:
        of_prompt = "" if prompt is None else f" of prompt {prompt}"
        raise ValueError(
            f"{path} has no completions{of_prompt} in step {step}; the last step is "
            f"{last_step(run_dir)}"
        )
    if worst or best:
        rows.sort(key=lambda row: -math.inf if row["reward"] is None else row["reward"])
        rows = rows[: worst or 0] + rows[max(len(rows) - (best or 0), worst or 0) :]
    Console().print(completions_table(rows))
