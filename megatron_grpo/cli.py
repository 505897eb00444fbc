"""Command line: `megatron-grpo train | check | eval | serve | place | plan | doctor | report`."""

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from megatron_grpo.config.config import Config
from megatron_grpo.config.config_file import load_config
from megatron_grpo.launch import placement
from megatron_grpo.launch.job_token import check_token, take_token
from megatron_grpo.launch.launch import LAUNCHER_VARIABLE, rank_place, start_ranks, tie_to_launcher
from megatron_grpo.launch.mistake import is_mistake
from megatron_grpo.launch.open_files import allow_open_files

SHOWN_FAULTS = 20
"""More would be the same one on other ranks and layers."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # markup would swallow the brackets of our examples
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
    rank. The exit code is 0 only when all steps are done and the model is exported; 1 after a
    failure, 2 for a mistake that shows before the first step, 75 after a signal (SIGTERM, SIGUSR1)
    to save and stop.

    \b
    Example:
      megatron-grpo train configs/demo_smollm2_135m.yaml train.num_steps=3
    """
    allow_open_files()
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
    from parallel.megatron_import import import_megatron

    import_megatron()
    from megatron_grpo.rank import run_rank

    run_rank(cfg, place, token)


def _silence_libraries() -> None:
    """Keep the terminal for the run: warnings of libraries to their own callers help no user."""
    for module in ("megatron", "torch", "parallel.device"):
        warnings.filterwarnings("ignore", module=rf"{module}\b")
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)


def _preflight(cfg: Config, token: str | None) -> None:
    _silence_libraries()
    from megatron_grpo.preflight import preflight  # httpx and more: not for `--help`

    preflight(cfg, token)


@app.command()
def check(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.sub=value pairs, as for train")
    ] = None,
) -> None:
    """Say whether CONFIG can start, without starting it.

    Looks at what train looks at before it starts a rank: the model's folder and the headers of its
    weights, the layout, an earlier run in train.run_dir, every row of the data, which is encoded,
    and the reward functions and the environment, which are loaded. Needs no GPU, and looks at none:
    that is for plan and doctor. A large data set takes minutes. A mistake is told in one message,
    and the exit code is then 2.

    \b
    Example:
      megatron-grpo check configs/grpo_70b.yaml data.path=data/deepscaler.jsonl
    """
    allow_open_files()
    cfg = load_config(config, overrides or [])
    _preflight(cfg, take_token(os.environ))
    print(f"{config} can start: nothing to mend in settings, model, run directory, data or rewards")


@app.command("eval")
def evaluate(
    config: Annotated[Path, typer.Argument(help="YAML file of the run, with a section `eval`.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="key.sub=value pairs, such as model.path=runs/math/hf eval.k=[1,8]"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results. Default: the folder `eval` in train.run_dir."),
    ] = None,
) -> None:
    """Evaluate the model in model.path on held-out prompts.

    These are named in the section `eval`. Engines of this host load the weights themselves; no
    trainer is started. Each prompt gets eval.num_generations completions (n), sampled by
    eval.temperature, top_p, top_k and max_completion_length. One passes when its reward, by
    eval.reward or else reward, is at least eval.pass_threshold. pass@k is the unbiased estimate of
    the chance that one of k passes; mean@n the mean reward over n.

    Prints a table, and writes eval.json (metrics and config) and eval_completions.jsonl, in the
    place of earlier ones. The exit code is 0 when all is evaluated, 1 after a failure, and 2 for a
    mistake that shows before the first completion.

    \b
    Example:
      megatron-grpo eval CONFIG model.path=runs/math/hf \\
          eval.data.path=data/test.jsonl eval.num_generations=8 \\
          eval.temperature=0.6 eval.top_p=0.95
    """
    allow_open_files()
    take_token(os.environ)  # nothing that is started here has any use for it
    cfg = load_config(config, overrides or [])
    _silence_libraries()
    from rich.console import Console

    from megatron_grpo.eval_command import FolderEvaluation, result_table  # torch: see above
    from megatron_grpo.rewards import RewardError

    with closing(FolderEvaluation(cfg, out or cfg.train.run_dir / "eval")) as evaluation:
        try:
            metrics = evaluation.run()
        except (RewardError, OSError) as error:
            print(f"megatron-grpo: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        Console().print(result_table(metrics))
        print(evaluation.out)


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
    """Run one rollout engine for CONFIG until interrupted.

    It is for runs that name its address. Engine and trainers share the token in the environment
    variable MEGATRON_GRPO_TOKEN. The engine takes the first GPUs that it sees, and so do the ranks
    of a trainer: where both are on one host, give it others by CUDA_VISIBLE_DEVICES.

    \b
    Example, the last line in another terminal with the same token:
      export MEGATRON_GRPO_TOKEN=$(openssl rand -hex 32)
      megatron-grpo serve CONFIG
      megatron-grpo train CONFIG rollout.base_urls=[http://127.0.0.1:8000]
    """
    allow_open_files()
    token = check_token(take_token(os.environ))
    cfg = load_config(config, overrides or [])
    from megatron_grpo.rollout.server import serve_forever  # not for `--help`

    serve_forever(cfg.model, cfg.rollout, host, port, token)


@app.command()
def place(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.sub=value pairs, as for train")
    ] = None,
    nodes: Annotated[str, typer.Option(help="Names of the job's nodes, by commas.")] = "localhost",
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of each, or ranks without GPUs.")] = 8,
) -> None:
    """Say which node of a job runs which ranks and engines.

    A line for each, as job scripts read it.

    \b
    Example:
      megatron-grpo place configs/grpo_8b.yaml --nodes node1 --gpus-per-node 8
    """
    cfg = load_config(config, overrides or [])
    placed = placement.place(cfg, nodes.split(","), gpus_per_node)
    print(f"run_dir {cfg.train.run_dir}\nranks_per_node {placed.ranks_per_node}")
    print(f"startup_timeout {cfg.rollout.startup_timeout:.0f}")
    for node in placed.trainer_nodes:
        print(f"trainer {node}")
    for engine in placed.engines:
        print(f"engine {engine.node} {','.join(map(str, engine.gpus))}")


@app.command()
def plan(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.sub=value pairs, as for train")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="Kind of the GPUs: a100, h100 (the default), h200, b200."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", help="Number of GPUs; default: the least whole nodes.")
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            "--lengths",
            help="File with one number per line: tokens of a prompt with its completion. "
            "Default: all as long as they may be.",
        ),
    ] = None,
    suggest: Annotated[
        bool, typer.Option("--suggest", help="Which layouts fit, the fastest first.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All figures, for scripts.")] = False,
    reshard: Annotated[
        bool, typer.Option("--reshard", help="Who sends how much when weights go to the engines.")
    ] = False,
    instantiate: Annotated[
        bool, typer.Option("--instantiate", help="Build every distinct rank, without its memory.")
    ] = False,
) -> None:
    """Say what CONFIG would need of GPUs and links; nothing is started.

    From CONFIG and the model's config.json alone: memory of a GPU of each pipeline stage in its
    worst phase, microbatches, operations, bytes over each link, and the least time that they take.
    Weights, gradients, optimizer and push are exact, the rest are estimates; docs/sizing.md has the
    formulas. The exit code is 2 where CONFIG cannot work or does not fit, with what would.

    With --instantiate, Megatron-Core's own modules are compared with the plan; the exit code is 1
    where they differ. It and --reshard take no other options.

    \b
    Example:
      megatron-grpo plan configs/grpo_70b.yaml --suggest --gpus 64 --gpu h100
    """
    options = {
        "--instantiate": instantiate,
        "--reshard": reshard,
        "--suggest": suggest,
        "--json": as_json,
        "--gpu": gpu,
        "--gpus": gpus,
        "--lengths": lengths,
    }
    _check_alone([option for option, value in options.items() if value])
    cfg = load_config(config, overrides or [])
    if instantiate:
        _instantiate(cfg)
    elif reshard:
        from megatron_grpo.planning.reshard_table import reshard_table  # torch: seconds, see above

        print(reshard_table(cfg))
    else:
        from megatron_grpo.planning.command import print_plan, print_suggestions

        show = print_suggestions if suggest else print_plan
        show(cfg, gpu=gpu or "h100", num_gpus=gpus, lengths_file=lengths, as_json=as_json)


def _check_alone(given: Sequence[str]) -> None:
    """Raise BadParameter for options of `plan` that another of them would leave without effect."""
    for alone in ("--instantiate", "--reshard"):
        others = [option for option in given if option != alone]
        if alone in given and others:
            raise typer.BadParameter(
                f"{alone} has a table of its own, without {', '.join(others)}: leave out one or "
                "the other"
            )


def _instantiate(cfg: Config) -> None:
    _silence_libraries()
    from parallel.megatron_import import import_megatron

    import_megatron()
    from megatron_grpo.planning.instantiate import instantiate  # Megatron: seconds, see above

    job = instantiate(cfg)
    if job.faults:
        first = "\n".join(job.faults[:SHOWN_FAULTS])
        print(
            f"megatron-grpo: {len(job.faults)} times not as planned\n{first}",
            file=sys.stderr,
        )
        raise typer.Exit(1)
    print(job.table)


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file of the run: its run directory, what it needs.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.sub=value pairs, as for train")
    ] = None,
) -> None:
    """Say whether this machine can train, and what is missing.

    What is missing is told with the command that installs it. Looks at packages, GPUs, network,
    limits, the file system of the run directory (of the working directory without CONFIG; some
    60 MB are written and removed), Slurm and container, in a few seconds. Under srun or torchrun
    every host is examined, rank 0 prints one table, and the clocks are compared. Ends with a block
    to paste into a bug report. The exit code is 1 when something is missing that training needs,
    else 0.

    \b
    Example, with MASTER_ADDR (the first node's name) and MASTER_PORT (a free
    port) exported:
      srun --nodes=8 --ntasks-per-node=1 megatron-grpo doctor CONFIG
    """
    from megatron_grpo.doctor.command import diagnose

    cfg = load_config(config, overrides or []) if config else None
    if not diagnose(cfg, rank_place(os.environ)):
        raise typer.Exit(1)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="Run directory with a metrics.jsonl.")],
) -> None:
    """Draw RUN_DIR/curves.png from its metrics.

    Reward, KL, lengths, log-probability gap, gradient norm and seconds, over the steps.

    \b
    Example:
      megatron-grpo report runs/demo_smollm2_135m
    """
    from megatron_grpo.reporting.report import draw_curves  # matplotlib: seconds, see above

    print(draw_curves(run_dir))


def main() -> None:
    """Entry point: what a user can mend is one line on stderr and exit code 2; 1 if it passes."""
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"megatron-grpo: {error}", file=sys.stderr)
        sys.exit(2 if is_mistake(error) else 1)


if __name__ == "__main__":
    main()
