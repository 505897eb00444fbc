"""The command that shows where a job's ranks and engines run; `cli` registers it."""

from pathlib import Path
from typing import Annotated

import typer

from megatron_grpo.config.file import load_config
from megatron_grpo.launch.launch import check_files
from megatron_grpo.launch.placement import check_shared, place_engines
from megatron_grpo.launch.placement import place as place_run

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file; see configs/ for complete examples.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY.SUB=VALUE",
        help="Overrides of keys, for example rollout.num_engines=4",
    ),
]


def place(
    config: ConfigFile,
    overrides: Overrides = None,
    nodes: Annotated[
        str, typer.Option(help="Node names of the job, separated by commas.")
    ] = "localhost",
    gpus_per_node: Annotated[
        int, typer.Option(min=1, help="GPUs per node; without GPUs, ranks per node.")
    ] = 8,
    only_engines: Annotated[
        bool,
        typer.Option("--only-engines", help="As many engines as fit: see slurm/engines.sh."),
    ] = False,
) -> None:
    """Show which node of a job runs which ranks and engines.

    Prints one line for each, in the format that the job scripts read. Then it looks for the files
    that CONFIG names, as rank 0 runs on the first node; the exit code is 2 if one is missing.

    \b
    Example:
      megatron-grpo place configs/grpo_8b.yaml --nodes node1 --gpus-per-node 8
    """
    cfg, hosts = load_config(config, overrides or []), nodes.split(",")
    place_all = place_engines if only_engines else place_run
    placed = place_all(cfg, hosts, gpus_per_node)
    if placed.shares_gpus:
        check_shared(cfg.rollout, cfg.dims.world_size, len(hosts) * gpus_per_node)
    print(f"run_dir {cfg.train.run_dir}")
    print(f"ranks_per_node {placed.ranks_per_node}")
    print(f"startup_timeout {cfg.rollout.startup_timeout:.0f}")
    print(placed)
    if not only_engines:
        check_files(cfg)
