"""Role of this process: a rank under torchrun or Slurm, or the one that starts ranks. No torch."""

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from checkpoint_convert.sidecar import tokenizer_file
from megatron_grpo.config.config import Config
from megatron_grpo.config.eval import section_of
from megatron_grpo.launch.parent_death import die_with_parent
from megatron_grpo.launch.process import START_SIGNALS
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE, make_folder, new_token

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
    """Place given by torchrun, or else by `srun`; None when this process is not a rank.

    A Slurm step with a single task counts as an interactive allocation, without ranks.
    """
    # Not RANK: PyTorch's images set RANK, WORLD_SIZE and LOCAL_RANK in every Slurm task.
    if "GROUP_WORLD_SIZE" in environ:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE")
    elif int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES")
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if missing:
            raise ValueError(
                f"{' and '.join(missing)} not set in this Slurm step of "
                f"{environ['SLURM_STEP_NUM_TASKS']} tasks: export the first node's name and a free "
                "port, or start `train --nnodes` once per node"
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
    """Make this rank die with the torchrun or srun that started it, even one that is killed."""
    die_with_parent()
    # A launcher that ended before the call above sends no signal.
    launcher = environ.get(LAUNCHER_VARIABLE)
    if launcher is not None and os.getppid() != int(launcher):
        sys.exit("the launcher is gone")


def check_host(cfg: Config, weights: int, num_gpus: int, memory: int) -> None:
    """Raise ValueError if one host has fewer GPUs than `cfg` has ranks, or without GPUs less
    `memory` than all copies of `weights` (bytes) in ranks and engines."""
    num_ranks = cfg.dims.world_size
    if 0 < num_gpus < num_ranks:
        raise ValueError(
            f"{cfg.dims} = {num_ranks} ranks need {num_ranks} GPUs, and this host has {num_gpus}: "
            "start a job on several hosts (docs/cluster.md), or choose another layout, such as "
            f"one that `megatron-grpo plan CONFIG --suggest --gpus {num_gpus}` names"
        )
    has_copies = not cfg.rollout.base_urls and cfg.rollout.quantization == "none"
    num_copies = 1 + (cfg.num_engines if has_copies else 0)
    if num_gpus == 0 and num_copies * weights > memory:
        raise ValueError(
            f"this host has no GPU and {memory / 1e9:,.0f} GB of memory, and the model's weights "
            f"alone, once in the ranks and once in each engine, take {num_copies} x "
            f"{weights / 1e9:,.0f} GB: start a job on GPUs (docs/cluster.md), or choose a smaller "
            "model"
        )


def check_files(cfg: Config) -> None:
    """Raise ValueError, with a line for each missing model, tokenizer, data set or user's file."""

    def check_model() -> None:
        cfg.model.check_folder()
        tokenizer_file(cfg.model.path)

    missing: list[str] = []
    for check in (check_model, cfg.data.check_exists, partial(check_held_out, cfg)):
        try:
            check()
        except ValueError as error:
            # Held-out data at data.path would be reported twice.
            if not any(each in str(error) for each in missing):
                missing.append(str(error))
    for kind, name in _user_code(cfg):
        if not (file := Path(name.rpartition(":")[0])).is_file():
            form = "" if file.suffix == ".py" else ": its form is file.py:name"
            folder = "" if file.is_absolute() else f" in {Path.cwd()}"
            missing.append(f"{kind} {file} does not exist{folder}{form}")
    if missing:
        raise ValueError("\n".join(missing))


def check_held_out(cfg: Config) -> None:
    """Raise ValueError for held-out prompts that do not exist."""
    for name, held_out in cfg.eval.named_sets.items():
        assert held_out.data is not None, "a set has prompts"
        try:
            held_out.data.check_exists()
        except ValueError as error:
            raise ValueError(f"{section_of(name)}: {error}") from None


def _user_code(cfg: Config) -> Iterator[tuple[str, str]]:
    """(kind of file, `file.py:name`) of all code that a config names."""
    functions = [each.name for reward in cfg.rewards.values() for each in reward.functions]
    yield from (("file of reward functions", name) for name in functions if ":" in name)
    yield from ((f"file of grpo.{key}", name) for key, name in cfg.grpo.own_functions.items())
    for view in cfg.by_source.values():
        if view.environment.name is not None:
            yield "file of an environment", view.environment.name
        if view.agent.function is not None:
            yield "file of an agent", view.agent.function
        yield from (("file of a tool", name) for name in view.agent.tools if ":" in name)


def start_ranks(
    cfg: Config, arguments: list[str], token: str | None, log_dir: Path | None
) -> NoReturn:
    """Replace this process by a torchrun that runs `megatron-grpo ARGUMENTS` on every rank here.

    Signals reach torchrun directly, and its exit code is ours. Rank 0 keeps the terminal, the
    others write to `log_dir`, by default `logs/` in the run directory. Ranks take the number of
    steps and the date from `cfg`. Each receives `token`, or a new one, in its environment and
    removes it.
    """
    num_ranks = cfg.dims.world_size
    logs = log_dir or cfg.train.run_dir / "logs"
    make_folder(logs)
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        # All ranks are on this host: gloo must not choose an external address.
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torchrun = [sys.executable, "-m", "megatron_grpo.launch.torchrun"]
    torchrun += ["--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port=0"]
    torchrun += [f"--nproc-per-node={num_ranks}", "--rdzv-id=ranks", f"--log-dir={logs}"]
    found = [f"train.num_steps={cfg.num_steps}", "train.num_epochs=null"]
    if cfg.data.date is not None:
        found += [f"data.date={json.dumps(cfg.data.date)}"]
    if cfg.grpo.file_sha256:
        found += [f"grpo.file_sha256={json.dumps(cfg.grpo.file_sha256)}"]
    command = [*torchrun, "-m", "megatron_grpo", *arguments, *found]
    # exec keeps the process id, by which ranks know torchrun.
    # Ranks know each other by a token even where no engine needs one.
    for_ranks = {LAUNCHER_VARIABLE: str(os.getpid()), TOKEN_VARIABLE: token or new_token()}
    # Until torchrun can handle them: it first imports torch, which takes seconds.
    signal.pthread_sigmask(signal.SIG_BLOCK, START_SIGNALS)
    os.execve(sys.executable, command, {**environment, **os.environ, **for_ranks})
