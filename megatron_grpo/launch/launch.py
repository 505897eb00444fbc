"""This process's role: a rank under torchrun or Slurm, or alone and about to start the ranks."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron_grpo.config.config import Config
from megatron_grpo.launch.job_token import TOKEN_VARIABLE
from megatron_grpo.launch.parent_death import die_with_parent

LAUNCHER_VARIABLE = "MEGATRON_GRPO_LAUNCHER"
"""Process id of the `megatron-grpo train` that started the ranks and did the preflight."""

OWN_LOGS_VARIABLE = "MEGATRON_GRPO_OWN_LOGS"
"""Set when every rank except 0 writes to its own log file."""


@dataclass(frozen=True)
class RankPlace:
    """This process's place among the trainer's ranks."""

    rank: int
    local_rank: int
    world_size: int
    num_hosts: int
    has_own_log: bool = False
    """Whether its stderr is its own log file and not the shared terminal."""


def rank_place(environ: Mapping[str, str]) -> RankPlace | None:
    """The place given by torchrun, or else by `srun`; None when this process is not a rank.

    PyTorch container images set RANK, WORLD_SIZE and LOCAL_RANK in every Slurm task, but only
    torchrun sets GROUP_WORLD_SIZE. A Slurm step with a single task is taken for an interactive
    allocation, not for a world of ranks.
    """
    if "GROUP_WORLD_SIZE" in environ:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE")
    elif int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES")
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if missing:
            raise ValueError(
                f"{' and '.join(missing)} not set in this Slurm step of "
                f"{environ['SLURM_STEP_NUM_TASKS']} tasks: export the first node's name and a free "
                "port, or start one torchrun per node"
            )
    else:
        return None
    rank, local_rank, world_size, num_hosts = (int(environ[name]) for name in names)
    return RankPlace(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        num_hosts=num_hosts,
        has_own_log=rank > 0 and OWN_LOGS_VARIABLE in environ,
    )


def tie_to_launcher(environ: Mapping[str, str]) -> None:
    """Make this rank die with the torchrun or srun that started it, even if that is killed."""
    die_with_parent()
    launcher = environ.get(LAUNCHER_VARIABLE)
    if launcher is not None and os.getppid() != int(launcher):
        sys.exit("the launcher is gone")


def start_ranks(cfg: Config, arguments: list[str], token: str | None) -> NoReturn:
    """Replace this process by a torchrun that runs `megatron-grpo ARGUMENTS` on every rank here.

    So signals reach torchrun directly, and its exit code is ours. Rank 0 keeps the terminal, the
    others write to `logs/` in the run directory. Each rank receives `token` in its environment and
    removes it from there.
    """
    num_ranks = cfg.dims.world_size
    logs = Path(cfg.train.run_dir) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        # All ranks are on this host: gloo must not choose an external address.
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torchrun = [sys.executable, "-m", "megatron_grpo.launch.torchrun"]
    torchrun += ["--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port=0"]
    torchrun += [f"--nproc-per-node={num_ranks}", "--rdzv-id=ranks", f"--log-dir={logs}"]
    if num_ranks > 1:
        to_files = ",".join(f"{rank}:3" for rank in range(1, num_ranks))
        torchrun += [f"--redirects={to_files}"]
    command = [*torchrun, "-m", "megatron_grpo.cli", *arguments]
    # exec keeps the process id
    for_ranks = {LAUNCHER_VARIABLE: str(os.getpid()), OWN_LOGS_VARIABLE: "1"}
    if token is not None:
        for_ranks[TOKEN_VARIABLE] = token
    os.execve(sys.executable, command, {**environment, **os.environ, **for_ranks})
