"""The commands that look into a run directory; `cli` registers them."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_dir: Annotated[Path, typer.Argument(help="Run directory with a metrics.jsonl.")],
) -> None:
    """Draw RUN_DIR/curves.png from its metrics.

    Plots reward, KL, completion lengths, log-probability gap, gradient norm and time over steps.

    \b
    Example:
      megatron-grpo report runs/demo_smollm2_135m
    """
    from megatron_grpo.reporting.report import draw_curves  # matplotlib: seconds

    print(draw_curves(run_dir))
