"""Command line: `megatron-grpo train | check | eval | serve | place | plan | doctor | ...`."""

import os
import sys
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_grpo.config.config import Config
from megatron_grpo.config.file import load_config
from megatron_grpo.inspect_commands import report, show, view
from megatron_grpo.launch.launch import (
    LAUNCHER_VARIABLE,
    check_files,
    check_held_out,
    check_host,
    rank_place,
    start_ranks,
    tie_to_launcher,
)
from megatron_grpo.launch.process import (
    allow_open_files,
    exit_when_interrupted,
    exit_when_preempted,
    is_user_error,
    outlive_readers,
    silence_libraries,
)
from megatron_grpo.launch.run_dir import interrupted_text, take_token
from megatron_grpo.place_command import place
from megatron_grpo.serve_command import serve

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file; see configs/ for complete examples.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY.SUB=VALUE",
        help="Overrides of keys, for example train.num_steps=3 grpo.beta=0.04",
    ),
]
Lengths = Annotated[
    Path | None,
    typer.Option(
        help="A run's completions.jsonl, or a file with one number per line: the tokens of a "
        "prompt and its completion. Default: every sequence has the maximum length.",
    ),
]
With = Annotated[
    list[str] | None,
    typer.Option("--with", metavar="KEY=VALUE", help="Show a plan with this override beside it."),
]
Instantiate = Annotated[
    bool,
    typer.Option("--instantiate", help="Build the modules of every distinct rank, without memory."),
]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # markup would swallow the brackets of our examples
    context_settings={"help_option_names": ["-h", "--help"]},
)
if TYPE_CHECKING:
    from megatron_grpo.prompt_checks import Checked


def _version(is_asked: bool) -> None:
    if is_asked:
        print(f"megatron-grpo {version('megatron-grpo')}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """GRPO training of language models: Megatron-Core trains, vLLM or SGLang rolls out.

    The command checkpoint-convert converts checkpoints, and shows what they hold.
    """


@app.command()
def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train CONFIG. Run the same command again to resume from its run directory.

    Started alone, it launches all ranks on this host with torchrun; under torchrun or srun it runs
    as one rank. Exit code: 0 when all steps are done and the model is exported, 1 after a failure,
    2 for a mistake found before the first step, 75 after SIGTERM or SIGUSR1: it saves and stops.

    \b
    Example:
      megatron-grpo train configs/demo_smollm2_135m.yaml train.num_steps=3
    """
    allow_open_files()
    cfg = load_config(config, overrides or [])
    token = take_token(os.environ)
    place = rank_place(os.environ)
    is_silent = place is not None and place.rank > 0
    exit_when_interrupted(None if is_silent else lambda: interrupted_text(cfg.train.run_dir))
    if place is None:
        with exit_when_preempted():
            cfg.model.check_folder()
            _check_host(cfg)
            cfg = _preflight(cfg, token).cfg
            start_ranks(cfg, ["train", str(config), *(overrides or [])], token)
    tie_to_launcher(os.environ)
    outlive_readers()
    if place.rank == 0 and LAUNCHER_VARIABLE not in os.environ:
        with exit_when_preempted():  # started by torchrun or srun, so not done yet
            cfg = _preflight(cfg, token).cfg
    silence_libraries()
    # Not above: torch and Megatron take seconds, and `--help` or a bad config should not wait.
    from parallel.megatron_import import import_megatron

    import_megatron()
    from megatron_grpo.run import open_run
    from megatron_grpo.train import train as train_on

    with open_run(cfg, place, token) as run:
        train_on(run)


def _check_host(cfg: Config) -> None:
    """Refuse a wrong layout, missing files, and a job of many hosts on a single one, such as a
    login node."""
    silence_libraries()
    from checkpoint_convert import check_divisible, hf_tensors
    from megatron_grpo.config.trained_shape import trained_shape
    from megatron_grpo.engines.support import num_gpus
    from megatron_grpo.planning.card import ITEMSIZE

    check_divisible(shape := trained_shape(cfg), cfg.dims)
    check_files(cfg)  # before `num_gpus` imports torch
    sizes = [prod(tensor) for tensor in hf_tensors(shape).values()]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    check_host(cfg, sum(sizes) * ITEMSIZE[cfg.model.dtype], num_gpus(), memory)


def _preflight(cfg: Config, token: str | None, starts_here: bool = True) -> "Checked":
    silence_libraries()
    from rich.console import Console

    from megatron_grpo.preflight import preflight  # aiohttp and more, which `--help` does not need

    with Console(stderr=True).status("checking settings, model, data and rewards"):
        return preflight(cfg, token, starts_here=starts_here)


@app.command()
def check(config: ConfigFile, overrides: Overrides = None) -> None:
    """Check that CONFIG can start, without starting it.

    Checks model, layout, data, rewards and an earlier run in train.run_dir, as train does; needs no
    GPU. Encodes every row (minutes for a large data set), prints the first prompt, scores trial
    completions of it and starts its agent. Exit code 2 after a mistake.

    \b
    Example:
      megatron-grpo check configs/grpo_70b.yaml data.path=data/deepscaler.jsonl
    """
    allow_open_files()
    cfg = load_config(config, overrides or [])
    checked = _preflight(cfg, take_token(os.environ), starts_here=False)
    print(checked.prompt)
    print(f"{config} can start: no mistakes in settings, model, folders, data{checked.tried}")


@app.command("eval")
def evaluate(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="YAML file of the run, with a section `eval`.")
    ],
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results. Default: the folder `eval` in train.run_dir."),
    ] = None,
) -> None:
    """Evaluate the model in model.path on held-out prompts.

    The section `eval` of CONFIG names the prompts. Engines on this host load the weights directly;
    no trainer is started. Each prompt gets n = eval.num_generations completions, sampled with
    eval.temperature, top_p, top_k and max_completion_length. A completion passes if its reward (by
    eval.reward, or else reward) is at least eval.pass_threshold. pass@k is the unbiased estimate of
    the probability that at least one of k completions passes; mean@n is the mean reward over n.
    Several data sets, each with its own n, are named in eval.sets.

    Prints a table and writes eval.json (metrics and config) and eval_completions.jsonl, replacing
    earlier ones. The exit code is 0 when all prompts are evaluated, 1 after a failure, and 2 for a
    mistake found before the first completion.

    \b
    Example:
      megatron-grpo eval CONFIG model.path=runs/math/hf \\
          eval.data.path=data/test.jsonl eval.num_generations=8 eval.top_p=0.95
    """
    allow_open_files()
    take_token(os.environ)  # nothing that is started here needs it
    cfg = load_config(config, overrides or [])
    check_held_out(cfg)
    exit_when_interrupted(lambda: "interrupted, stopping the engines")
    silence_libraries()
    from rich.console import Console

    from megatron_grpo.agents.fork_pool import InstancesLost
    from megatron_grpo.eval_command import FolderEvaluation, result_table  # torch: see above
    from megatron_grpo.rewards.scoring import RewardError

    with closing(FolderEvaluation(cfg, out or cfg.train.run_dir / "eval")) as evaluation:
        try:
            metrics = evaluation.run()
        except (RewardError, InstancesLost, OSError) as error:
            print(f"megatron-grpo: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        Console().print(result_table(metrics, cfg.eval.named_sets))
        print(evaluation.out)


for job_command in (serve, place):
    app.command()(job_command)


@app.command()
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU model: a100, h100 (the default), h200 or b200.")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Number of GPUs. Default: as few whole nodes as needed."),
    ] = None,
    lengths: Lengths = None,
    suggest: Annotated[
        bool, typer.Option("--suggest", help="List parallel layouts that fit, fastest first.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all figures as JSON, for scripts.")
    ] = False,
    changes: With = None,
    instantiate: Instantiate = False,
) -> None:
    """Estimate memory, time and traffic of CONFIG; nothing is started.

    Reads only CONFIG and the model's config.json. Shows, for each pipeline stage, the memory of a
    GPU in the phase that needs most; and microbatches, operations, bytes over each link, and lower
    bounds of the time of a step and of a generation. Weights, gradients, optimizer and push are
    exact, the rest are estimates; docs/formulas.md has the formulas. If CONFIG cannot work or does
    not fit, it says what would, and the exit code is 2.

    --with, given once or several times, prints two columns: CONFIG as it is, and with all of these
    overrides. --instantiate, alone, compares the plan with Megatron-Core's own modules; the exit
    code is 1 if they differ.

    \b
    Examples:
      megatron-grpo plan configs/grpo_70b.yaml --suggest --gpus 64 --gpu h200
      megatron-grpo plan configs/grpo_70b.yaml --with grpo.shared_prompts=true \\
          --with train.max_tokens_per_microbatch=16384
    """
    options = {
        "--instantiate": instantiate,
        "--suggest": suggest,
        "--with": changes,
        "--json": as_json,
        "--gpu": gpu,
        "--gpus": gpus,
        "--lengths": lengths,
    }
    _refuse_combinations(options, "--instantiate", *options)
    _refuse_combinations(options, "--suggest", "--with")
    cfg = load_config(config, overrides or [])
    cfg.model.check_folder(only_config=True)
    if instantiate:
        _instantiate(cfg)
        return
    from megatron_grpo.planning.command import print_comparison, print_plan, print_suggestions

    show = print_suggestions if suggest else print_plan
    if changes:
        show = partial(print_comparison, config=config, overrides=overrides or [], changes=changes)
    show(cfg, gpu=gpu or "h100", num_gpus=gpus, lengths_file=lengths, as_json=as_json)


def _refuse_combinations(options: Mapping[str, object], one: str, *others: str) -> None:
    given = [other for other in others if options[other] and other != one]
    if options[one] and given:
        raise typer.BadParameter(f"{one} cannot be combined with {', '.join(given)}")


def _instantiate(cfg: Config) -> None:
    silence_libraries()
    from parallel.megatron_import import import_megatron

    import_megatron()
    from megatron_grpo.planning.instantiate import print_comparison  # Megatron: seconds, see above

    if not print_comparison(cfg):
        raise typer.Exit(1)


@app.command()
def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG", help="YAML file of the run, for its directory and packages."
        ),
    ] = None,
    overrides: Overrides = None,
    as_report: Annotated[
        bool,
        typer.Option("--report", help="Also print every check, as a block for bug reports."),
    ] = False,
) -> None:
    """Check whether this machine can train, and what is missing.

    Takes a few seconds and checks packages, GPUs, network, limits, Slurm, the container, and the
    file system of the run directory (without CONFIG: of the working directory), where it writes
    about 60 MB and deletes it again. Problems come first, each with the command that fixes it.
    Under srun or torchrun it examines every host and compares their clocks, and rank 0 prints one
    table for all. The exit code is 1 if something is missing that training needs, else 0.

    \b
    Example, with MASTER_ADDR (the first node's name) and MASTER_PORT (a free
    port) exported:
      srun --nodes=8 --ntasks-per-node=1 megatron-grpo doctor CONFIG
    """
    from megatron_grpo.doctor.command import diagnose

    cfg = load_config(config, overrides or []) if config else None
    if not diagnose(cfg, rank_place(os.environ), as_report=as_report):
        raise typer.Exit(1)


for command in (report, show, view):
    app.command()(command)


def main() -> None:
    """Run the command line. ValueError and OSError become one message on stderr.

    The exit code is 2 for a mistake that the user can fix, 1 for an error that may be transient.
    """
    try:
        app()
    except (ValueError, OSError, ModuleNotFoundError) as error:
        advice = "; see megatron-grpo doctor" if isinstance(error, ModuleNotFoundError) else ""
        print(f"megatron-grpo: {error}{advice}", file=sys.stderr)
        sys.exit(2 if is_user_error(error) else 1)
