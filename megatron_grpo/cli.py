"""Command line: `megatron-grpo train | serve | plan | report`."""

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from megatron_grpo.config import Config
from megatron_grpo.config_file import load_config
from megatron_grpo.job_token import check_token, take_token
from megatron_grpo.launch import LAUNCHER_VARIABLE, rank_place, start_ranks, tie_to_launcher

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="GRPO training of language models: Megatron-Core trains, vLLM rolls out.",
)


@app.callback()
def commands() -> None:
    """Keeps subcommands named even while there are few of them."""


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="YAML file; see configs/ for complete examples.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="key.sub=value pairs, for example train.num_steps=3 grpo.beta=0.04"),
    ] = None,
) -> None:
    """Train CONFIG. The same command again resumes from its run directory.

    Alone, it starts every rank of this host with torchrun; under torchrun or srun it joins as one
    rank. The exit code is 0 only when all steps are done and the model is exported.

    Example: megatron-grpo train configs/demo_smollm2_135m.yaml parallel.tensor_parallel_size=3
    """
    cfg = load_config(config, overrides or [])
    token = take_token(os.environ)
    place = rank_place(os.environ)
    if place is None:
        _preflight(cfg, token)
        start_ranks(cfg, ["train", str(config), *(overrides or [])], token)
    tie_to_launcher(os.environ)
    if place.rank == 0 and LAUNCHER_VARIABLE not in os.environ:
        _preflight(cfg, token)  # started by torchrun or srun: nobody has done it
    _silence_libraries()
    # Imported here because a rank's imports (torch, Megatron) take seconds, which `--help` and the
    # refusal of a bad config should not.
    from megatron_grpo.train import run_rank

    run_rank(cfg, place, token)


def _silence_libraries() -> None:
    """Keep the terminal for the run: warnings of libraries to their own callers help no user."""
    for module in ("megatron", "torch", "parallel.device"):
        warnings.filterwarnings("ignore", module=rf"{module}\b")
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)


def _preflight(cfg: Config, token: str | None) -> None:
    _silence_libraries()
    from megatron_grpo.preflight import preflight  # reads the tokenizer: seconds, see above

    preflight(cfg, token)


@app.command()
def serve(
    config: Annotated[Path, typer.Argument(help="YAML file of the run that the engine is for.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.sub=value pairs, as for train")
    ] = None,
    host: Annotated[
        str, typer.Option(help="The one address of this host on which trainers reach it.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port on that address.")] = 8000,
) -> None:
    """Run one rollout engine for CONFIG until interrupted, for runs that name its address.

    Engine and trainers share the token in the environment variable MEGATRON_GRPO_TOKEN.

    Example: export MEGATRON_GRPO_TOKEN=$(openssl rand -hex 32); megatron-grpo serve CONFIG, and in
    another terminal with the same token
    megatron-grpo train CONFIG rollout.base_urls=[http://127.0.0.1:8000]
    """
    token = check_token(take_token(os.environ))
    cfg = load_config(config, overrides or [])
    from megatron_grpo.rollout.server import serve_forever  # torch: seconds, see above

    serve_forever(cfg.model, cfg.rollout, host, port, token)


@app.command()
def plan(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.sub=value pairs, as for train")
    ] = None,
    reshard: Annotated[
        bool, typer.Option("--reshard", help="Who sends how much when weights go to the engines.")
    ] = False,
) -> None:
    """Say what CONFIG would do, from it and the model's config.json alone; nothing is started.

    Example: megatron-grpo plan configs/demo_smollm2_135m.yaml --reshard rollout.num_engines=2
    """
    cfg = load_config(config, overrides or [])
    if not reshard:
        raise ValueError("plan has one table so far: add --reshard")
    from megatron_grpo.plan import reshard_table  # torch: seconds, see above

    print(reshard_table(cfg))


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="Run directory with a metrics.jsonl.")],
) -> None:
    """Draw RUN_DIR/curves.png from its metrics: reward, KL, lengths, log-probability gap."""
    from megatron_grpo.report import draw_curves  # matplotlib: seconds, see above

    print(draw_curves(run_dir))


def main() -> None:
    """Entry point: what a user can mend is one line on stderr and exit code 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"megatron-grpo: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
