"""Places the ranks and engines of a Slurm job on its nodes. Without torch, for batch scripts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from megatron_grpo.config.config import Config
from parallel import ParallelDims


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


def place(cfg: Config, nodes: Sequence[str], gpus_per_node: int) -> Placement:
    """Put ranks on the first nodes and engines on the remaining GPUs.

    If these cannot hold all engines, engines share GPUs with the ranks. An engine of more GPUs than
    a node has takes whole nodes. Raises ValueError if ranks or such an engine do not fill nodes, or
    if there are too few nodes.
    """
    num_ranks, tensor = cfg.dims.world_size, cfg.rollout.tensor_parallel_size
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
    check_engine_size(tensor, gpus_per_node)
    free = [
        *_places(nodes[:num_trainers], ranks_per_node, gpus_per_node, tensor),
        *_places(nodes[num_trainers:], 0, gpus_per_node, tensor),
    ]
    shared = sorted(_places(nodes, 0, gpus_per_node, tensor), key=lambda at: at.gpus.start)
    num_engines = cfg.rollout.num_engines
    places = free if num_engines <= len(free) else shared
    if num_engines > len(places):
        fewer = f"set it to {len(places)} or less, or take more nodes"
        least = -(-tensor // gpus_per_node)
        raise ValueError(
            f"rollout.num_engines {num_engines} of {tensor} GPUs each do not fit on {len(nodes)} "
            f"nodes of {gpus_per_node}: {fewer if places else f'take {least} nodes or more'}"
        )
    return Placement(nodes[:num_trainers], ranks_per_node, places[:num_engines])


def check_engine_size(tensor: int, gpus_per_node: int) -> None:
    """Raise ValueError if an engine of `tensor` GPUs is larger than a node and does not fill nodes.

    vLLM splits an engine evenly over its nodes.
    """
    if tensor > gpus_per_node and tensor % gpus_per_node:
        raise ValueError(
            f"rollout.tensor_parallel_size {tensor} does not fill nodes of {gpus_per_node} GPUs: "
            f"set it to {gpus_per_node}, or to a multiple such as "
            f"{-(-tensor // gpus_per_node) * gpus_per_node}"
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
