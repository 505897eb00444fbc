"""The command that runs one rollout engine; `cli` registers it."""

import os
from pathlib import Path
from typing import Annotated

import typer

from megatron_grpo.checkpoints.folders import how_ended
from megatron_grpo.config.file import load_config
from megatron_grpo.launch.process import allow_open_files
from megatron_grpo.launch.run_dir import check_token, take_token

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file of the run that the engine is for.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY.SUB=VALUE",
        help="Overrides of keys, for example rollout.tensor_parallel_size=2",
    ),
]
MasterAddr = Annotated[str, typer.Option(help="Address of node 0 for the others.")]
MasterPort = Annotated[
    int,
    typer.Option(
        help="A free port of node 0. The workers meet there, on all interfaces and without "
        "authentication: keep others off this network.",
        min=1,
        max=65535,
    ),
]


def serve(
    config: ConfigFile,
    overrides: Overrides = None,
    host: Annotated[
        str, typer.Option(help="IP address of this host that trainers connect to.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port on that address.", min=1, max=65535)] = 8000,
    nnodes: Annotated[int, typer.Option(help="Nodes that the engine spans.", min=1)] = 1,
    node_rank: Annotated[
        int, typer.Option(help="Which of them this is; node 0 answers trainers.", min=0)
    ] = 0,
    master_addr: MasterAddr = "127.0.0.1",
    master_port: MasterPort = 29501,
    join: Annotated[
        bool,
        typer.Option("--join", help="Join the run in train.run_dir while it trains."),
    ] = False,
) -> None:
    """Run one rollout engine for CONFIG until interrupted.

    Training runs use it if its address is in their rollout.base_urls. Engine and trainers must have
    the same token in the environment variable MEGATRON_GRPO_TOKEN. `serve` and `train`
    both start at GPU 0: on one host, give the engine others with CUDA_VISIBLE_DEVICES.

    With --join, a run that has other engines in rollout.base_urls uses this one from its next push
    of weights on, if it has the same token and config. Ctrl-C, SIGTERM or SIGUSR1 let it leave: it
    ends after a further push, and at once on a second signal or when the run is complete.
    slurm/engines.sh is a job of such engines.

    An engine of more GPUs than a node has spans several. `train --nnodes` and the jobs in slurm/
    run this command on each of them, and end it on all when it ends on one.

    \b
    Example (run the last line in another terminal, with the same token):
      export MEGATRON_GRPO_TOKEN=$(openssl rand -hex 32)
      megatron-grpo serve CONFIG
      megatron-grpo train CONFIG rollout.base_urls=[http://127.0.0.1:8000]
    \b
    Another engine for that run, while it trains:
      megatron-grpo serve runs/demo/config.yaml --join --port 8001
    """
    allow_open_files()
    token = check_token(take_token(os.environ))
    cfg = load_config(config, overrides or [])
    from megatron_grpo.engines.arguments import EngineNode  # not for `--help`
    from megatron_grpo.engines.server import serve as serve_engine

    node = EngineNode(nnodes, node_rank, master_addr, master_port)
    checkpoints, num_steps = cfg.train.run_dir / "checkpoints", cfg.train.num_steps

    def is_complete() -> bool:  # the config.yaml of a run has num_steps in place of num_epochs
        return num_steps is not None and how_ended(checkpoints, num_steps, cfg.train.hooks) != ""

    serve_engine(cfg, host, port, token, node, is_complete if join else None)
