"""This process's role: a rank under torchrun or Slurm, or alone and about to start the ranks.

Under Slurm, the ranks and engines of a job are placed on its nodes. Without torch, for batch
scripts.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import NoReturn

from checkpoint_convert.sidecar import tokenizer_file
from megatron_grpo.config.config import Config
from megatron_grpo.config.eval import section_of
from megatron_grpo.config.reward import RewardFunction, count_gpus, served_here
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.launch.parent_death import die_with_parent
from megatron_grpo.launch.process import START_SIGNALS
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE, make_folder
from parallel import ParallelDims

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


def check_host(cfg: Config, weights: int, num_gpus: int, memory: int) -> None:
    """Raise ValueError if one host with `num_gpus` GPUs cannot hold all ranks of `cfg`.

    Without GPUs, ranks and engines have the model's `weights` in the host's `memory`, both in
    bytes, and more that is not counted here.
    """
    num_ranks = cfg.dims.world_size
    if 0 < num_gpus < num_ranks:
        raise ValueError(
            f"{cfg.dims} = {num_ranks} ranks need as many GPUs, and this host has {num_gpus}: "
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
    """Raise ValueError, with a line for each model, tokenizer, data or Python file of the user's
    that does not exist."""

    def check_model() -> None:
        cfg.model.check_folder()
        tokenizer_file(cfg.model.path)

    missing: list[str] = []
    for check in (check_model, cfg.data.check_exists, partial(check_held_out, cfg)):
        try:
            check()
        except ValueError as error:
            if not any(each in str(error) for each in missing):  # held-out data at data.path
                missing.append(str(error))
    for kind, name in _user_code(cfg):
        if not (file := Path(name.rpartition(":")[0])).is_file():
            form = "" if file.suffix == ".py" else ": its form is file.py:name"
            missing.append(f"{kind} {file} does not exist{form}")
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
    """What a config names as `file.py:name`, each with the kind of its file."""
    functions = [each.name for reward in cfg.rewards.values() for each in reward.functions]
    yield from (("file of reward functions", name) for name in functions if ":" in name)
    for view in cfg.by_source.values():
        if view.environment.name is not None:
            yield "file of an environment", view.environment.name
        if view.agent.function is not None:
            yield "file of an agent", view.agent.function
        yield from (("file of a tool", name) for name in view.agent.tools if ":" in name)


def start_ranks(cfg: Config, arguments: list[str], token: str | None) -> NoReturn:
    """Replace this process by a torchrun that runs `megatron-grpo ARGUMENTS` on every rank here.

    So signals reach torchrun directly, and its exit code is ours. Rank 0 keeps the terminal, the
    others write to `logs/` in the run directory. All take the number of steps from `cfg`. Each
    receives `token` in its environment and removes it from there.
    """
    num_ranks = cfg.dims.world_size
    logs = Path(cfg.train.run_dir) / "logs"
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
    if num_ranks > 1:
        to_files = ",".join(f"{rank}:3" for rank in range(1, num_ranks))
        torchrun += [f"--redirects={to_files}"]
    length = [f"train.num_steps={cfg.num_steps}", "train.num_epochs=null"]
    command = [*torchrun, "-m", "megatron_grpo", *arguments, *length]
    # exec keeps the process id
    for_ranks = {LAUNCHER_VARIABLE: str(os.getpid()), OWN_LOGS_VARIABLE: "1"}
    if token is not None:
        for_ranks[TOKEN_VARIABLE] = token
    # Until torchrun can tell of them: it first imports torch, which takes seconds.
    signal.pthread_sigmask(signal.SIG_BLOCK, START_SIGNALS)
    os.execve(sys.executable, command, {**environment, **os.environ, **for_ranks})


@dataclass(frozen=True)
class EnginePlace:
    """Where one engine runs."""

    nodes: Sequence[str]
    """One, or all nodes that it spans."""
    gpus: range
    """Indices of its GPUs on each of them."""


@dataclass(frozen=True)
class Placement:
    """Where everything of a job runs."""

    trainer_nodes: Sequence[str]
    ranks_per_node: int
    engines: Sequence[EnginePlace]

    def __str__(self) -> str:
        """A line for each node of ranks and for each engine, as the job scripts read them."""
        ranks = [f"trainer {node}" for node in self.trainer_nodes]
        engines = [
            f"engine {','.join(each.nodes)} {','.join(map(str, each.gpus))}"
            for each in self.engines
        ]
        return "\n".join([*ranks, *engines])

    @property
    def shares_gpus(self) -> bool:
        """Whether an engine has GPUs of ranks."""
        return any(
            node in self.trainer_nodes and engine.gpus.start < self.ranks_per_node
            for engine in self.engines
            for node in engine.nodes
        )


def place(cfg: Config, nodes: Sequence[str], gpus_per_node: int) -> Placement:
    """Put ranks on the first nodes and engines on the remaining GPUs.

    Reward models that the run serves have those of rank 0's node behind its ranks. If the others
    cannot hold all engines, engines share GPUs with the ranks. An engine of more GPUs than
    a node has takes whole nodes. Raises ValueError if ranks or such an engine do not fill nodes, or
    if there are too few nodes. A replay has no engines.
    """
    num_ranks, size = cfg.dims.world_size, cfg.rollout.gpus_per_engine
    ranks_per_node = min(num_ranks, gpus_per_node)
    if num_ranks % ranks_per_node:
        data = _full_data_size(cfg.dims, gpus_per_node)
        raise ValueError(
            f"{num_ranks} ranks do not fill nodes of {gpus_per_node} GPUs: set "
            f"parallel.data_parallel_size to {data}, for {num_ranks // cfg.dims.data * data} ranks"
        )
    num_trainers = num_ranks // ranks_per_node
    if num_trainers > len(nodes):
        raise ValueError(
            f"{num_ranks} ranks need {num_trainers} nodes of {gpus_per_node} GPUs, and the job has "
            f"{len(nodes)}: sbatch --nodes={num_trainers}"
        )
    num_engines = cfg.num_engines
    if num_engines:
        check_engine_size(cfg.rollout, gpus_per_node)
    is_free = _beside_reward_models(cfg, nodes[0], ranks_per_node, gpus_per_node)
    free = [
        *filter(is_free, _places(nodes[:num_trainers], ranks_per_node, gpus_per_node, size)),
        *_places(nodes[num_trainers:], 0, gpus_per_node, size),
    ]
    all_places = filter(is_free, _places(nodes, 0, gpus_per_node, size))
    shared = sorted(all_places, key=lambda at: at.gpus.start)
    places = free if num_engines <= len(free) else shared
    if num_engines > len(places):
        fewer = f"set it to {len(places)} or less, or take more nodes"
        least = -(-size // gpus_per_node)
        raise ValueError(
            f"rollout.num_engines {num_engines} of {size} GPUs each do not fit on {len(nodes)} "
            f"nodes of {gpus_per_node}: {fewer if places else f'take {least} nodes or more'}"
        )
    return Placement(nodes[:num_trainers], ranks_per_node, places[:num_engines])


def check_shared(rollout: RolloutConfig, num_ranks: int, num_gpus: int) -> None:
    """Raise ValueError if ranks and engines would make generations ahead on `num_gpus` GPUs that
    they share, and that could be divided."""
    if rollout.max_staleness and num_gpus > 1:
        raise ValueError(
            f"{num_ranks} ranks, and engines of {rollout.num_engines * rollout.gpus_per_engine} "
            f"GPUs in all, would share {num_gpus} GPUs. With rollout.max_staleness "
            f"{rollout.max_staleness} both compute at the same time, and no faster there: take "
            "more GPUs, fewer ranks, fewer or smaller engines, or set rollout.max_staleness=0"
        )


def _beside_reward_models(
    cfg: Config, node: str, ranks_per_node: int, gpus_per_node: int
) -> Callable[[EnginePlace], bool]:
    """Whether an engine's place leaves the reward models theirs on `node`, behind its ranks.

    Raises ValueError if they have none.
    """
    models = served_here(cfg.rewards.values())
    check_shared_gpus(models, gpus_per_node)
    num_gpus = count_gpus(models, shared=False)
    end = ranks_per_node + num_gpus
    if end > gpus_per_node:
        raise ValueError(
            f"reward_model: {num_gpus} GPUs for reward models behind the {ranks_per_node} ranks of "
            f"a node of {gpus_per_node}: put fewer ranks on a node, let the model share their GPUs "
            "(share_gpus: true), or serve it elsewhere, as docs/rewards.md says, and give its "
            "base_url in place of path"
        )
    own = {*range(ranks_per_node, end)}
    return lambda at: node not in at.nodes or own.isdisjoint(at.gpus)


def check_shared_gpus(models: Sequence[RewardFunction], gpus_per_node: int) -> None:
    """Raise ValueError if the reward models that share GPUs need more than a node has."""
    num_gpus = count_gpus(models, shared=True)
    if num_gpus > gpus_per_node:
        raise ValueError(
            f"reward_model: {num_gpus} GPUs for reward models that share them, one model on each, "
            f"and rank 0's host has {gpus_per_node}: lower tensor_parallel_size, or serve a model "
            "elsewhere and give its base_url in place of path"
        )


def place_engines(cfg: Config, nodes: Sequence[str], gpus_per_node: int) -> Placement:
    """Fill all nodes with engines, whose ranks are another job's.

    Raises ValueError if an engine is larger than a node and cannot fill nodes, or than all.
    """
    size = cfg.rollout.gpus_per_engine
    check_engine_size(cfg.rollout, gpus_per_node)
    engines = [*_places(nodes, 0, gpus_per_node, size)]
    if not engines:
        raise ValueError(
            f"{cfg.rollout.engine_size_text} needs {-(-size // gpus_per_node)} nodes of "
            f"{gpus_per_node} GPUs for an engine, and the job has {len(nodes)}"
        )
    return Placement(nodes[:0], 0, engines)


def check_engine_size(rollout: RolloutConfig, gpus_per_node: int) -> None:
    """Raise ValueError if an engine is larger than a node, and does not fill nodes or cannot span
    them.

    Engines are split evenly over their nodes. Those of SGLang with several groups of workers have
    one: over several, nodes ask the first at one more port, and this was not tried.
    """
    size = rollout.gpus_per_engine
    if size > gpus_per_node and rollout.engine == "sglang" and rollout.data_parallel_size > 1:
        raise ValueError(
            f"{rollout.engine_size_text}: an engine of SGLang with several groups of workers does "
            f"not span nodes, of {gpus_per_node} GPUs here: set rollout.data_parallel_size to "
            f"{max(1, gpus_per_node // rollout.tensor_parallel_size)} at most, or use "
            "rollout.engine=vllm"
        )
    if size > gpus_per_node and size % gpus_per_node:
        raise ValueError(
            f"{rollout.engine_size_text} does not fill nodes of {gpus_per_node} GPUs: set it to "
            f"{gpus_per_node}, or to a multiple such as {-(-size // gpus_per_node) * gpus_per_node}"
        )


def _full_data_size(dims: ParallelDims, gpus_per_node: int) -> int:
    """The next data parallel size at which ranks fill nodes, and experts can be split over them."""
    return next(
        data
        for data in count(dims.data)
        if dims.world_size // dims.data * data % gpus_per_node == 0
        and dims.stage_size // dims.data * data % (dims.expert * dims.expert_tensor) == 0
    )


def _places(
    nodes: Sequence[str], taken: int, gpus_per_node: int, tensor: int
) -> Iterator[EnginePlace]:
    """Where engines fit on `nodes`, behind the first `taken` GPUs of each, aligned by size."""
    span = -(-tensor // gpus_per_node)
    size = tensor // span
    first = -(-taken // size) * size
    for number in range(0, len(nodes) - span + 1, span):
        for start in range(first, gpus_per_node - size + 1, size):
            yield EnginePlace(nodes[number : number + span], range(start, start + size))
