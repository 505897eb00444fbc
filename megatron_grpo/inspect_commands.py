"""The commands that look into run directories; `cli` registers them."""

import math
import signal
from pathlib import Path
from typing import Annotated, Any

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
        Path, typer.Argument(metavar="RUN_DIR", help="Run directory, or folder of an evaluation.")
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
    by: Annotated[
        str | None,
        typer.Option(
            metavar="FUNCTION", help="Reward function for --worst and --best. Default: their sum."
        ),
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(help="Completions of the prompt in this row.", min=0),
    ] = None,
) -> None:
    """Print completions of a step of RUN_DIR, by prompt, with rewards.

    Without --worst and --best, prints all of them. A completion whose reward failed counts as the
    worst. A step that trains again on completions of an earlier one has none of its own.

    \b
    Example:
      megatron-grpo show runs/demo_smollm2_135m --step 12 --worst 5
    """
    from rich.console import Console

    from megatron_grpo.reporting.progress import completions_by_prompt
    from megatron_grpo.reporting.run import Run

    run = Run(run_dir)
    step = run.last_step if step is None else step
    rows = [row for row in run.completions(step) if prompt in (None, row["prompt_index"])]
    if not rows:
        of_prompt = "" if prompt is None else f" of prompt {prompt}"
        raise ValueError(
            f"{run_dir} has no completions{of_prompt} in step {step}; the last step is "
            f"{run.last_step}"
        )
    if by and by not in (names := {name for row in rows for name in row["rewards"]}):
        raise ValueError(f"--by {by}: the reward functions are {', '.join(sorted(names))}")
    if worst or best:

        def score(row: dict[str, Any]) -> float:
            value = row["rewards"].get(by) if by else row["reward"]
            return -math.inf if value is None else value

        rows.sort(key=score)
        rows = rows[: worst or 0] + rows[max(len(rows) - (best or 0), worst or 0) :][::-1]
    Console().print(completions_by_prompt(rows))


def view(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR", help="Run directories, or folders of them."),
    ],
    port: Annotated[
        int, typer.Option(help="Port of 127.0.0.1 for the page.", min=1, max=65535)
    ] = 8808,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the page to this file, to send it, and serve nothing."),
    ] = None,
) -> None:
    """Show curves, completions and tokens of runs in the browser.

    Shows curves, completions, tokens, evaluations, timeline and config. A click on a curve selects
    a step, and its completions can be read, the worst first; their tokens are coloured by
    log-probability gap, ratio, advantage, entropy, loss weight or policy version. Several runs are
    listed; the curves of the chosen ones are drawn together, their configs compared, and the
    completions of a prompt shown side by side. The page follows a run that is running. It is served
    on this host alone, changes nothing, and ends with Ctrl-C.

    --html writes all metrics, evaluations, timeline and config, and the completions and tokens of
    the newest steps, into one file that needs neither this command nor a network.

    \b
    Example, and from your machine for a run on another HOST:
      megatron-grpo view runs
      ssh -t -L 8808:127.0.0.1:8808 HOST megatron-grpo view runs/math
    """
    from megatron_grpo.viewer.html_file import write_html
    from megatron_grpo.viewer.run import RunFiles, run_names, runs_in
    from megatron_grpo.viewer.server import HOST, Server

    run_dirs = runs_in(run_dirs)
    runs = dict(zip(run_names(run_dirs), map(RunFiles, run_dirs), strict=True))
    if html:
        write_html(runs, html)
        print(html)
        return
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it is the page's ordinary end
    with Server(runs, port) as server:
        print(f"http://{HOST}:{port}   Ctrl-C ends this", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
