"""Command line: `megatron-grpo train | check | eval | serve | place | plan | doctor | ...`."""

import os
import sys
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from megatron_grpo.command_arguments import ConfigFile, Overrides
from megatron_grpo.config.config import Config
from megatron_grpo.config.file import load_config
from megatron_grpo.inspect_commands import report, show, view
from megatron_grpo.launch.launch import check_held_out, rank_place
from megatron_grpo.launch.process import (
    allow_open_files,
    exit_when_interrupted,
    is_user_error,
    silence_libraries,
)
from megatron_grpo.launch.run_dir import take_token
from megatron_grpo.place_command import place
from megatron_grpo.serve_command import serve
from megatron_grpo.train_command import check, train

Gpu = Annotated[
    str | None,
    typer.Option(
        help="GPU: h100 (the default), a100, h200, b200, b300, gb200, l40s, rtx-6000-ada, "
        "rtx-pro-6000, or figures of another: 96GB,990TFLOPs,4TB/s."
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


app.command()(train)
app.command()(check)


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


app.command()(serve)
app.command()(place)


@app.command()
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    gpu: Gpu = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Number of GPUs. Default: as few whole nodes as needed."),
    ] = None,
    lengths: Lengths = None,
    suggest: Annotated[
        bool,
        typer.Option("--suggest", help="Divide GPUs, and list layouts that fit, fastest first."),
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
