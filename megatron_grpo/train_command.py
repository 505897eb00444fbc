"""The commands that train, and check that CONFIG can start; `cli` registers them."""

import os
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_grpo.command_arguments import ConfigFile, Overrides
from megatron_grpo.config.config import Config
from megatron_grpo.config.file import load_config
from megatron_grpo.launch.launch import (
    LAUNCHER_VARIABLE,
    RankPlace,
    check_files,
    check_host,
    rank_place,
    start_ranks,
    tie_to_launcher,
)
from megatron_grpo.launch.process import (
    allow_open_files,
    exit_when_interrupted,
    exit_when_preempted,
    outlive_readers,
    silence_libraries,
)
from megatron_grpo.launch.run_dir import interrupted_text, take_token
from parallel.words import counted

HOST_DEFAULTS = (0, "127.0.0.1", 29500, None, None)
NumNodes = Annotated[
    int | None, typer.Option(help="Hosts on which this command is started.", min=1)
]
NodeRank = Annotated[int, typer.Option(help="Which of them this is, from 0.", min=0)]
MasterAddr = Annotated[
    str, typer.Option(help="Address or name of host 0, by which the others reach it.")
]
MasterPort = Annotated[
    int, typer.Option(help="First of 64 free ports, for this run alone.", min=1024, max=65472)
]
LocalAddr = Annotated[
    str | None,
    typer.Option(help="Address of this host. Default: the one on its route to host 0."),
]
GpusPerNode = Annotated[
    int | None,
    typer.Option(
        help="GPUs of each host; without GPUs, its ranks. Default: those of this host.", min=1
    ),
]
LogDir = Annotated[
    Path | None, typer.Option(help="Folder of logs. Default: `logs` in train.run_dir.")
]

if TYPE_CHECKING:
    from rich.status import Status

    from megatron_grpo.prompt_checks import Checked


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    nnodes: NumNodes = None,
    node_rank: NodeRank = 0,
    master_addr: MasterAddr = "127.0.0.1",
    master_port: MasterPort = 29500,
    local_addr: LocalAddr = None,
    gpus_per_node: GpusPerNode = None,
    log_dir: LogDir = None,
) -> None:
    """Train CONFIG. Run the same command again to resume from its run directory.

    Started alone, it launches all ranks on this host with torchrun; under torchrun or srun it runs
    as one rank. With --nnodes it is started once on each of several hosts, with the same
    MEGATRON_GRPO_TOKEN, and there launches the ranks and engines that `megatron-grpo place` shows.

    A mistake in data or rewards then shows when the engines are there: run `check` before.

    Exit code: 0 when all steps are done, or a hook has ended the run, and the model is exported, 1
    after a failure, 2 for a mistake found before the first step, 75 after SIGTERM or SIGUSR1: it
    saves and stops.

    \b
    Examples (the second one on host 0 of 8; on the others with their own number):
      megatron-grpo train configs/demo_smollm2_135m.yaml train.num_steps=3
      megatron-grpo train configs/grpo_70b.yaml \\
          --nnodes 8 --node-rank 0 --master-addr host0
    """
    allow_open_files()
    cfg = load_config(config, overrides or [])
    token = take_token(os.environ)
    arguments = [str(config), *(overrides or [])]
    place = rank_place(os.environ) if nnodes is None else None
    is_silent = place is not None and place.rank > 0
    exit_when_interrupted(None if is_silent else lambda: interrupted_text(cfg.train.run_dir))
    if nnodes is not None:
        with exit_when_preempted():
            # Of torch's store, which warns of every address without a name.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            from megatron_grpo.host_part import HostPlace, host_part, run_host  # torch, see below

            host = HostPlace(nnodes, node_rank, master_addr, master_port, local_addr)
            run_host(cfg, host_part(cfg, arguments, host, gpus_per_node, log_dir), token)
    if (node_rank, master_addr, master_port, local_addr, gpus_per_node) != HOST_DEFAULTS:
        raise typer.BadParameter("the options of a host among several need --nnodes")
    if place is None:
        with exit_when_preempted():
            cfg.model.check_folder()
            with _status():
                _check_host(cfg)
                cfg = _preflight(cfg, token).cfg
            _print_start(cfg)
            start_ranks(cfg, ["train", *arguments], token, log_dir)
    _be_rank(cfg, place, token)


def _be_rank(cfg: Config, place: RankPlace, token: str | None) -> None:
    tie_to_launcher(os.environ)
    outlive_readers()
    if place.rank == 0 and LAUNCHER_VARIABLE not in os.environ:
        with exit_when_preempted(), _status():  # started by torchrun or srun, so not done yet
            cfg = _preflight(cfg, token).cfg
        _print_start(cfg)
    silence_libraries()
    # Not above: torch and Megatron take seconds, and `--help` or a bad config should not wait.
    from parallel.megatron_import import import_megatron

    import_megatron()
    from megatron_grpo.rank import open_rank
    from megatron_grpo.trainer import train as train_on

    with open_rank(cfg, place, token) as rank:
        train_on(rank)


def _print_start(cfg: Config) -> None:
    ranks = counted(cfg.dims.world_size, "rank")
    print(f"all checks passed; {ranks} will import PyTorch and Megatron-Core ...", flush=True)


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
    from megatron_grpo.preflight import preflight  # aiohttp and more, which `--help` does not need

    return preflight(cfg, token, starts_here=starts_here)


def _status() -> "Status":
    """A line on a terminal while checks, and their imports, take seconds."""
    from rich.console import Console

    return Console(stderr=True).status("checking settings, model, data and rewards")


def check(config: ConfigFile, overrides: Overrides = None) -> None:
    """Check that CONFIG can start, without starting it.

    Checks model, layout, data, rewards and an earlier run in train.run_dir, as train does; needs no
    GPU. Encodes every row (minutes for a large data set), prints the first prompt and scores trial
    completions of it. With an environment or agent, plays its session, with the row's answer for
    each turn of the model, and prints which tokens would be trained on. Exit code 2 after a
    mistake.

    \b
    Example:
      megatron-grpo check configs/grpo_70b.yaml data.path=data/deepscaler.jsonl
    """
    allow_open_files()
    cfg = load_config(config, overrides or [])
    with _status():
        checked = _preflight(cfg, take_token(os.environ), starts_here=False)
    print(checked)
