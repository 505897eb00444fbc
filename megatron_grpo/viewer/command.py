"""The command `view`; `cli` registers it."""

import signal
from pathlib import Path
from typing import Annotated

import typer


def view(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR", help="Run directories with a metrics.jsonl."),
    ],
    port: Annotated[
        int, typer.Option(help="Port of 127.0.0.1 for the page.", min=1, max=65535)
    ] = 8808,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the page to this file, to send it, and serve nothing."),
    ] = None,
) -> None:
    """Look into runs in the browser: why a curve bends, what is said.

    Shows curves, completions, tokens, evaluations, timeline and config. A click on a curve selects
    a step, and its completions can be read, the worst first; their tokens are coloured by
    log-probability gap, ratio, advantage, entropy, loss weight or policy version. With several runs
    their curves are drawn together, and their configs compared. The page follows a run that is
    running. It is served on this host alone, changes nothing, and ends with Ctrl-C.

    --html writes all metrics, evaluations, timeline and config, and the completions and tokens of
    the newest steps, into one file that needs neither this command nor a network.

    \b
    Example, and from your machine for a run on another HOST:
      megatron-grpo view runs/demo_smollm2_135m
      ssh -t -L 8808:127.0.0.1:8808 HOST megatron-grpo view runs/math
    """
    from megatron_grpo.viewer.html_file import write_html
    from megatron_grpo.viewer.run import RunFiles, run_names
    from megatron_grpo.viewer.server import HOST, Server

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
