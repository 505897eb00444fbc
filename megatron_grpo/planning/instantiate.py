"""`megatron-grpo plan --instantiate`: builds every rank of a job without its peers or its memory.

The planner relies on layouts. Here they are compared with Megatron-Core itself: the modules,
gradient buffers and optimizer that the run would create, on torch's meta device, rank by rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from rich.console import Console
from rich.progress import track

from checkpoint_convert import (
    ModelShape,
    check_divisible,
    hf_tensors,
    padded_vocab_size,
    read_shape,
)
from checkpoint_convert.megatron import checkpoint_layout
from megatron_grpo.config.config import Config
from megatron_grpo.planning.built_rank import BuiltRank, build_rank
from megatron_grpo.planning.state import state_bytes
from megatron_grpo.weights.worker_layouts import worker_layouts
from parallel import (
    Layout,
    ParallelDims,
    check_push,
    cover_exactly,
    pipeline_layers,
)
from parallel.device import setup_device


@dataclass(frozen=True, kw_only=True)
class Instantiation:
    """The result of `instantiate`."""

    table: str
    """A summary for people; empty when there are faults."""
    faults: list[str]
    """Differences from the plan: in parameters, their bytes, or what all ranks hold together."""


def instantiate(cfg: Config) -> Instantiation:
    """Build every distinct rank of `cfg` and check what the planner says about it.

    Only the config.json of `cfg.model.path` is read. Raises ValueError when the mesh of the trainer
    or an engine cannot split the model, or when Megatron-Core rejects its config.
    """
    shape, dims = read_shape(cfg.model.path), cfg.dims
    check_divisible(shape, dims)
    workers = worker_layouts(shape, cfg.rollout)
    ranks = build_ranks(cfg, shape)
    senders = [built.sender for built in ranks]
    faults = [fault for built in ranks for fault in built.faults]
    faults += differing_bytes(cfg, shape, ranks)
    if faults:  # what wrong layouts cover together is not worth reporting
        return Instantiation(table="", faults=faults)
    try:
        cover_exactly(hf_tensors(shape), [sender.layout for sender in senders])
        num_boxes = check_push(senders, workers)
    except ValueError as error:
        return Instantiation(table="", faults=[str(error)])
    lines = [
        _model_line(shape, cfg),
        "",
        *_rows(shape, dims, ranks),
        "",
        *_found(dims, ranks, workers, num_boxes),
    ]
    return Instantiation(table="\n".join(lines), faults=[])


def build_ranks(cfg: Config, shape: ModelShape) -> list[BuiltRank]:
    """Build every distinct rank of a job, in ascending order, and compare it with its layout."""
    setup_device(0)
    saved = checkpoint_layout(shape, padded_vocab_size(shape, cfg.dims))
    console = Console(stderr=True)
    return [
        build_rank(cfg, shape, rank, saved)
        for rank in track(
            distinct_ranks(cfg.dims),
            "building ranks",
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
    ]


def differing_bytes(cfg: Config, shape: ModelShape, ranks: Sequence[BuiltRank]) -> list[str]:
    """Where the planned bytes of a rank differ from those of its modules, buffers and optimizer."""
    faults = []
    for built in ranks:
        state = state_bytes(cfg, shape, built.sender.rank)
        for what, planned, found in (
            ("weights", state.weights, built.weight_bytes),
            ("gradients", state.gradients, built.gradient_bytes),
            ("optimizer", state.optimizer, built.optimizer_bytes),
        ):
            if planned != found:
                faults.append(
                    f"rank {built.sender.rank}: {what} take {found:,} bytes as built and "
                    f"{planned:,} as planned"
                )
    return faults


def distinct_ranks(dims: ParallelDims) -> list[int]:
    """The first rank of every group of identical ranks, ascending.

    Data ranks are copies of each other, except for the experts that they hold.
    """
    first: dict[tuple[int, ...], int] = {}
    for rank in range(dims.world_size):
        at, experts = dims.coordinates(rank), dims.expert_place(dims.coordinates(rank))
        role = (at.tensor, at.context, at.pipeline, experts.tensor, experts.expert)
        first.setdefault(role, rank)
    return list(first.values())


def _model_line(shape: ModelShape, cfg: Config) -> str:
    size = sum(map(prod, hf_tensors(shape).values()))
    return (
        f"{shape.family}, {size / 1e9:,.2f} B parameters in {cfg.model.dtype}, on "
        f"{cfg.dims.world_size} ranks: {cfg.dims}"
    )


def _rows(shape: ModelShape, dims: ParallelDims, ranks: Sequence[BuiltRank]) -> list[str]:
    """A row for each pipeline stage with the largest number of bytes of each kind on any rank."""
    rows = [
        f"{'trainer ranks':<16}{'stage':>6}  {'layers':<12}{'built':>6}"
        f"{'weights':>14}{'gradients':>14}{'optimizer':>14}"
    ]
    for stage, chunks in enumerate(pipeline_layers(shape.num_layers, dims)):
        first = stage * dims.stage_size
        of_stage = [r for r in ranks if first <= r.sender.rank < first + dims.stage_size]
        rows.append(
            f"{f'{first}-{first + dims.stage_size - 1}':<16}{stage:>6}  "
            f"{'+'.join(str(len(layers)) for layers in chunks):<12}{len(of_stage):>6}"
            f"{_gigabytes(max(r.weight_bytes for r in of_stage)):>14}"
            f"{_gigabytes(max(r.gradient_bytes for r in of_stage)):>14}"
            f"{_gigabytes(max(r.optimizer_bytes for r in of_stage)):>14}"
        )
    return rows


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.3f} GB"


def _found(
    dims: ParallelDims, ranks: Sequence[BuiltRank], workers: Sequence[Layout], num_boxes: int
) -> list[str]:
    num_parameters = sum(len(built.sender.layout.shapes) for built in ranks)
    return [
        f"{len(ranks)} of {dims.world_size} ranks, one of each kind, were built: name, shape, type "
        f"and place of their {num_parameters:,} parameters are as planned",
        "loading: every element of the weight files is owned once, and every element of a rank is "
        "filled once",
        f"push: every element of an engine of {len(workers)} arrives once, in {num_boxes:,} boxes",
    ]
