"""Places of ranks and engines on the nodes of a job; without torch, for batch scripts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from megatron_grpo.config.config import Config
from megatron_grpo.config.reward import RewardFunction, count_gpus, served_here
from megatron_grpo.config.rollout import RolloutConfig
from parallel import ParallelDims
from parallel.words import counted

NODES_VARIABLE = "MEGATRON_GRPO_ENGINE_NODES"
"""Number of nodes of an engine whose parts are ended together, by `train` or Kubernetes."""


@dataclass(frozen=True)
class EnginePlace:
    """The nodes and GPUs of one engine."""

    nodes: Sequence[str]
    """One node, or all nodes that the engine spans."""
    gpus: range
    """Indices of its GPUs on each node."""


@dataclass(frozen=True)
class Placement:
    """The nodes and GPUs of a job's ranks and engines."""

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

    @property
    def num_gpus(self) -> int:
        """GPUs of ranks, engines, or both."""
        ranks = {(node, gpu) for node in self.trainer_nodes for gpu in range(self.ranks_per_node)}
        engines = {(node, gpu) for at in self.engines for node in at.nodes for gpu in at.gpus}
        return len(ranks | engines)


def place(cfg: Config, nodes: Sequence[str], gpus_per_node: int) -> Placement:
    """Put ranks on the first nodes and engines on the remaining GPUs.

    Reward models that the run serves take the GPUs behind the ranks on rank 0's node. If the
    remaining GPUs cannot hold all engines, engines share GPUs with the ranks. An engine larger than
    a node takes whole nodes. A replay has no engines, and engines of `rollout.base_urls` have no
    place here. Raises ValueError if ranks do not fill their nodes, or nodes are too few.
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
            f"{num_ranks} ranks need {num_trainers} nodes of {counted(gpus_per_node, 'GPU')}, and "
            f"the job has {len(nodes)}: take --nodes={num_trainers}"
        )
    num_engines = 0 if cfg.rollout.base_urls else cfg.num_engines
    if num_engines:
        check_engine_size(cfg.rollout, gpus_per_node)
    is_free = _avoids_reward_models(cfg, nodes[0], ranks_per_node, gpus_per_node)
    free = [
        *filter(is_free, _places(nodes[:num_trainers], ranks_per_node, gpus_per_node, size)),
        *_places(nodes[num_trainers:], 0, gpus_per_node, size),
    ]
    all_places = filter(is_free, _places(nodes, 0, gpus_per_node, size))
    # Spread over the nodes: the first place of each node, then the second ones.
    shared = sorted(all_places, key=lambda at: at.gpus.start)
    places = free if num_engines <= len(free) else shared
    if num_engines > len(places):
        fewer = f"set it to {len(places)} or less, or take more nodes"
        more = f"take {counted(-(-size // gpus_per_node), 'node')} or more"
        raise ValueError(
            f"rollout.num_engines {num_engines} of {counted(size, 'GPU')} each do not fit on "
            f"{counted(len(nodes), 'node')} of {gpus_per_node}: {fewer if places else more}"
        )
    placed = Placement(nodes[:num_trainers], ranks_per_node, places[:num_engines])
    if placed.shares_gpus:
        check_shared(cfg.rollout, num_ranks, len(nodes) * gpus_per_node)
    return placed


def check_shared(rollout: RolloutConfig, num_ranks: int, num_gpus: int) -> None:
    """Raise ValueError for generations made ahead on shared GPUs, unless there is only one GPU."""
    if rollout.max_staleness and num_gpus > 1:
        raise ValueError(
            f"{counted(num_ranks, 'rank')} would share {num_gpus} GPUs with engines of "
            f"{rollout.num_engines * rollout.gpus_per_engine}, and rollout.max_staleness "
            f"{rollout.max_staleness} gains nothing on shared GPUs: take more GPUs, fewer ranks, "
            "fewer or smaller engines, or set rollout.max_staleness=0"
        )


def _avoids_reward_models(
    cfg: Config, node: str, ranks_per_node: int, gpus_per_node: int
) -> Callable[[EnginePlace], bool]:
    """Test that an engine's place leaves free the reward models' GPUs, behind the ranks of `node`;
    ValueError if the node has too few."""
    models = served_here(cfg.rewards.values())
    check_shared_gpus(models, gpus_per_node)
    num_gpus = count_gpus(models, shared=False)
    end = ranks_per_node + num_gpus
    if end > gpus_per_node:
        raise ValueError(
            f"reward_model: {counted(num_gpus, 'GPU')} for reward models behind the "
            f"{counted(ranks_per_node, 'rank')} of a node of {gpus_per_node}: put fewer ranks on a "
            "node, let the model share their GPUs (share_gpus: true), or serve it elsewhere, as "
            "docs/rewards.md says, and give its base_url in place of path"
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
    """Fill all nodes with engines for the ranks of another job; ValueError for an engine larger
    than all nodes, or larger than a node but not whole nodes."""
    size = cfg.rollout.gpus_per_engine
    check_engine_size(cfg.rollout, gpus_per_node)
    engines = [*_places(nodes, 0, gpus_per_node, size)]
    if not engines:
        raise ValueError(
            f"{cfg.rollout.engine_size_text} needs {-(-size // gpus_per_node)} nodes of "
            f"{counted(gpus_per_node, 'GPU')} for an engine, and the job has {len(nodes)}"
        )
    return Placement(nodes[:0], 0, engines)


def check_engine_size(rollout: RolloutConfig, gpus_per_node: int) -> None:
    """Raise ValueError if an engine is larger than a node and cannot fill whole nodes."""
    size = rollout.gpus_per_engine
    # With several groups, SGLang's nodes contact the first one at a further port: untested.
    if size > gpus_per_node and rollout.engine == "sglang" and rollout.data_parallel_size > 1:
        raise ValueError(
            f"{rollout.engine_size_text}: an engine of SGLang with several groups of workers does "
            f"not span nodes, of {counted(gpus_per_node, 'GPU')} here: set "
            "rollout.data_parallel_size to "
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
    """Places for engines on `nodes`, behind the first `taken` GPUs of each; a place starts at a
    multiple of its size."""
    span = -(-tensor // gpus_per_node)
    size = tensor // span
    first = -(-taken // size) * size
    for number in range(0, len(nodes) - span + 1, span):
        for start in range(first, gpus_per_node - size + 1, size):
            yield EnginePlace(nodes[number : number + span], range(start, start + size))
