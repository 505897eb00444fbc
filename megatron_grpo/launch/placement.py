"""Places the ranks and engines of a Slurm job on its nodes. Without torch, for batch scripts."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_grpo.config.config import Config


@dataclass(frozen=True)
class EnginePlace:
    """Where one engine runs."""

    node: str
    gpus: range
    """Indices of its GPUs on the node."""


@dataclass(frozen=True)
class Placement:
    """Where everything of a job runs."""

    trainer_nodes: Sequence[str]
    ranks_per_node: int
    engines: Sequence[EnginePlace]


def place(cfg: Config, nodes: Sequence[str], gpus_per_node: int) -> Placement:
    """Put ranks on the first nodes and engines on the remaining GPUs.

    If these cannot hold all engines, engines share GPUs with the ranks. Raises ValueError if ranks
    do not fill nodes, an engine does not fit on one, or there are too few nodes.
    """
    num_ranks, tensor = cfg.dims.world_size, cfg.rollout.tensor_parallel_size
    ranks_per_node = min(num_ranks, gpus_per_node)
    if num_ranks % ranks_per_node:
        raise ValueError(
            f"{num_ranks} ranks do not fill nodes of {gpus_per_node} GPUs: take a multiple, such "
            f"as {-(-num_ranks // gpus_per_node) * gpus_per_node}, by parallel.data_parallel_size"
        )
    num_trainers = num_ranks // ranks_per_node
    if num_trainers > len(nodes):
        raise ValueError(
            f"{num_ranks} ranks need {num_trainers} nodes of {gpus_per_node} GPUs, and the job has "
            f"{len(nodes)}: sbatch --nodes={num_trainers}"
        )
    check_engine_size(tensor, gpus_per_node)
    free = [
        EnginePlace(node, range(first, first + tensor))
        for number, node in enumerate(nodes)
        for first in _blocks(ranks_per_node if number < num_trainers else 0, gpus_per_node, tensor)
    ]
    shared = [
        EnginePlace(node, range(first, first + tensor))
        for first in _blocks(0, gpus_per_node, tensor)
        for node in nodes
    ]
    num_engines = cfg.rollout.num_engines
    places = free if num_engines <= len(free) else shared
    if num_engines > len(places):
        raise ValueError(
            f"rollout.num_engines {num_engines} of {tensor} GPUs each do not fit on {len(nodes)} "
            f"nodes of {gpus_per_node}: set it to {len(places)} or less, or take more nodes"
        )
    return Placement(nodes[:num_trainers], ranks_per_node, places[:num_engines])


def check_engine_size(tensor: int, gpus_per_node: int) -> None:
    """Raise ValueError if a node cannot hold an engine of `tensor` GPUs."""
    if tensor > gpus_per_node:
        raise ValueError(
            f"rollout.tensor_parallel_size {tensor} is more than the {gpus_per_node} GPUs of a "
            f"node: an engine runs on one node, set it to {gpus_per_node} or less"
        )


def _blocks(first: int, end: int, size: int) -> range:
    """First GPUs of the aligned blocks of `size` GPUs in the range from `first` to `end`."""
    start = -(-first // size) * size
    return range(start, end - size + 1, size)
