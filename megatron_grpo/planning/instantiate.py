"""`megatron-grpo plan --instantiate`: builds every rank of a job without its peers or its memory.

The planner relies on layouts. Here they are compared with Megatron-Core itself: the modules,
gradient buffers and optimizer that the run would create, on torch's meta device, rank by rank.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from checkpoint_convert import (
    ModelShape,
    check_divisible,
    hf_tensors,
    padded_vocab_size,
)
from checkpoint_convert.megatron import checkpoint_layout, float32_tensors
from megatron_grpo.bars import tracked
from megatron_grpo.checkpoints.state import weight_layout
from megatron_grpo.config.config import Config
from megatron_grpo.config.file import with_num_steps
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.engine_weights.layouts import worker_layouts, worker_shards
from megatron_grpo.engines.vllm.args import check_adapters
from megatron_grpo.planning.rows import facts, table
from megatron_grpo.planning.state import state_bytes
from megatron_grpo.policy.lora import add_adapters
from megatron_grpo.policy.lora_targets import check_lora, peft_tensors
from megatron_grpo.policy.model import (
    Model,
    Policy,
    add_gradients,
    add_optimizer,
    build_model,
    weight_sender,
)
from megatron_grpo.policy.optimizer_state import SplitFloats, states_of
from megatron_grpo.policy.residency import chained_optimizers, gradient_buffers
from parallel import (
    Layout,
    ParallelDims,
    Sender,
    Shape,
    ShardMapping,
    check_push,
    cover_exactly,
    pipeline_layers,
)
from parallel.cpu_device import setup_device
from parallel.fake_rank import WithoutMemory, fake_rank
from parallel.words import counted


@dataclass(frozen=True, kw_only=True)
class BuiltRank:
    """A rank and the memory that its modules, buffers and optimizer would take."""

    sender: Sender
    """Shard layout of the rank, checked against the built modules."""
    adapters: Sender | None
    """Shard layout of the adapters; None if all weights are trained."""
    weight_bytes: int
    """Adapters included."""
    frozen_bytes: int
    """Part of `weight_bytes` that is frozen, under adapters."""
    gradient_bytes: int
    optimizer_bytes: int
    faults: tuple[str, ...]
    """How the modules differ from the plan."""


def build_rank(cfg: Config, shape: ModelShape, rank: int, saved: Layout) -> BuiltRank:
    """Build the modules, gradient buffers and optimizer of a rank without allocating memory.

    `saved` is the `checkpoint_layout` of the model. `setup_device` must have been called.
    """
    dtype = getattr(torch, cfg.model.dtype)
    with fake_rank(cfg.dims, rank) as groups:
        with WithoutMemory():
            model = build_model(cfg, shape, groups)
        faults = list(compare(model, saved, dtype))
        with WithoutMemory():
            if cfg.lora.r:
                model.adapters = add_adapters(
                    model.chunks, shape, model.layout, cfg.lora, groups, seed=None
                )
            add_gradients(model, cfg)
            policy = add_optimizer(model, cfg, groups)
        weights = list(policy.parameters().values())
        adapters, frozen = policy.adapters, [each for each in weights if not each.requires_grad]
        if adapters is not None:
            trained = policy.saved_parameters()
            planned = {name: (size, dtype) for name, size in adapters.layout.shapes.items()}
            faults += _differing(trained, planned)
            weights += trained.values()
        return BuiltRank(
            sender=weight_sender(policy, groups),
            adapters=adapters.sender if adapters else None,
            weight_bytes=sum(each.nbytes for each in weights),
            frozen_bytes=sum(each.nbytes for each in frozen) if adapters else 0,
            gradient_bytes=gradient_bytes(policy),
            optimizer_bytes=optimizer_bytes(policy),
            faults=tuple(f"rank {rank}: {fault}" for fault in faults),
        )


def gradient_bytes(policy: Policy) -> int:
    """Bytes of all gradient buffers, including padding."""
    return sum(buffer.grad_data.nbytes for buffer in gradient_buffers(policy))


def optimizer_bytes(policy: Policy) -> int:
    """Bytes of this rank's share of master weights and moments.

    Not counted: float32 weights, which are their own master weights, and of split master weights
    (`SplitFloats`) the half that is the bfloat16 weight.
    """
    return sum(
        values.rest.nbytes if isinstance(values, SplitFloats) else values.nbytes
        for part in chained_optimizers(policy)
        for parameter in part.model_param_group_index_map
        for name, values in states_of(part, parameter).items()
        if (name, parameter.dtype) != ("param", torch.float32)
    )


def compare(model: Model, saved: Layout, dtype: torch.dtype) -> Iterator[str]:
    """How the modules of a rank differ from its layout.

    Compares names, shapes and dtypes; if they agree, also the place of each parameter in the model,
    which Megatron-Core states in coordinates of a checkpoint (`saved`).
    """
    different = list(_differing_shapes(model, dtype))
    yield from different
    if not different:
        yield from _differing_places(weight_layout(model).compose(saved), model.layout)
    try:
        model.layout.check_complete()
    except ValueError as error:
        yield str(error)


def _differing_shapes(model: Model, dtype: torch.dtype) -> Iterator[str]:
    float32 = float32_tensors(model.shape)
    source = {piece.local: piece.tensor for piece in model.layout.pieces}
    planned = {
        name: (size, torch.float32 if source[name] in float32 else dtype)
        for name, size in model.layout.shapes.items()
    }
    return _differing(model.parameters(), planned)


def _differing(
    parameters: Mapping[str, torch.Tensor], planned: Mapping[str, tuple[Shape, torch.dtype]]
) -> Iterator[str]:
    built = {name: (tuple(each.shape), each.dtype) for name, each in parameters.items()}
    for name in {**built, **planned}:
        if built.get(name) != planned.get(name):
            yield f"{name} is {_words(built, name)} as built and {_words(planned, name)} as planned"


def _words(tensors: Mapping[str, tuple[Shape, torch.dtype]], name: str) -> str:
    if name not in tensors:
        return "absent"
    size, dtype = tensors[name]
    return f"{list(size)} {str(dtype).removeprefix('torch.')}"


def _differing_places(built: Layout, planned: Layout) -> Iterator[str]:
    found, wanted = _places(built.pieces), _places(planned.pieces)
    for name in planned.shapes:
        own, other = found.get(name, set()), wanted.get(name, set())
        if own != other:
            yield (
                f"{name} holds {_first(own - other)} as built and {_first(other - own)} as planned"
            )


Place = tuple[str, Shape, Shape, Shape]
"""A tensor of the model, start and size of a box in it, and the start of that box locally."""


def _places(pieces: Iterable[ShardMapping]) -> dict[str, set[Place]]:
    """Places of each local tensor's boxes in the model."""
    places: dict[str, set[Place]] = {}
    for piece in pieces:
        # Stacked tensors of a checkpoint have leading dimensions that the parameter lacks.
        depth = len(piece.local_box.start) - len(piece.box.start)
        place = piece.tensor, piece.box.start, piece.box.size, piece.local_box.start[depth:]
        places.setdefault(piece.local, set()).add(place)
    return places


def _first(places: set[Place]) -> str:
    if not places:
        return "nothing more"
    tensor, start, size, local_start = min(places)
    box = ", ".join(f"{a}:{a + extent}" for a, extent in zip(start, size, strict=True))
    return f"{tensor}[{box}] at {list(local_start)}"


@dataclass(frozen=True, kw_only=True)
class Instantiation:
    """The result of `instantiate`."""

    table: str
    """A summary for people; empty when there are faults."""
    faults: list[str]
    """Differences from the plan: in parameters, their bytes, or what all ranks hold together."""


SHOWN_FAULTS = 20
"""Further ones mostly repeat these on other ranks and layers."""


def print_comparison(cfg: Config) -> bool:
    """Print the table of `instantiate` or the first differences; returns whether there are none."""
    job = instantiate(cfg)
    if not job.faults:
        print(job.table)
        return True
    first = "\n".join(job.faults[:SHOWN_FAULTS])
    print(
        f"megatron-grpo: {counted(len(job.faults), 'difference')} from the plan\n{first}",
        file=sys.stderr,
    )
    return False


MANY_STEPS = 1_000_000_000
"""Stands in for the number of steps, which depends on the data; modules do not depend on it."""


def instantiate(cfg: Config) -> Instantiation:
    """Build every distinct rank of `cfg` and check what the planner says about it.

    Only the config.json of `cfg.model.path` is read. Raises ValueError when the mesh of the trainer
    or an engine cannot split the model, when Megatron-Core rejects its config, and for an optimizer
    on the host.
    """
    if cfg.optimizer.optimizer_cpu_offload:
        raise ValueError(
            "optimizer.optimizer_cpu_offload true: ranks are built without memory here, so none of "
            "theirs can be on the host; set it to false to build the rest"
        )
    cfg = with_num_steps(cfg, MANY_STEPS)
    shape, dims = trained_shape(cfg), cfg.dims
    check_divisible(shape, dims)
    check_lora(cfg.lora, shape, dims.tensor)
    if cfg.num_engines:
        check_adapters(cfg.lora, shape)
    workers = worker_layouts(shape, cfg.rollout)
    ranks = build_ranks(cfg, shape)
    senders = [built.sender for built in ranks]
    adapters = [built.adapters for built in ranks if built.adapters]
    faults = [fault for built in ranks for fault in built.faults]
    faults += differing_bytes(cfg, shape, ranks)
    if faults:  # what wrong layouts cover together is not worth reporting
        return Instantiation(table="", faults=faults)
    try:
        cover_exactly(hf_tensors(shape), [sender.layout for sender in senders])
        num_boxes = check_push(senders, workers)
        if adapters:
            whole = peft_tensors(cfg.lora, shape)
            cover_exactly(whole, [sender.layout for sender in adapters])
        if cfg.lora.is_served:
            num_boxes = check_push(adapters, worker_shards(cfg, shape).pushed)
    except ValueError as error:
        return Instantiation(table="", faults=[str(error)])
    lines = [
        _model_line(shape, cfg),
        "",
        *_rows(shape, dims, ranks),
        "",
        *_found(cfg, ranks, workers, num_boxes),
    ]
    return Instantiation(table="\n".join(lines), faults=[])


def build_ranks(cfg: Config, shape: ModelShape) -> list[BuiltRank]:
    """Build every distinct rank of a job, in ascending order, and compare it with its layout."""
    setup_device(0)
    saved = checkpoint_layout(shape, padded_vocab_size(shape, cfg.dims))
    ranks = tracked(distinct_ranks(cfg.dims), "building ranks")
    return [build_rank(cfg, shape, rank, saved) for rank in ranks]


def differing_bytes(cfg: Config, shape: ModelShape, ranks: Sequence[BuiltRank]) -> list[str]:
    """Where the planned bytes of a rank differ from those of its modules, buffers and optimizer."""
    faults = []
    for built in ranks:
        state = state_bytes(cfg, shape, built.sender.rank)
        for what, planned, found in (
            ("weights", state.weights, built.weight_bytes),
            ("frozen weights", state.frozen, built.frozen_bytes),
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
        f"{shape.family}, {size / 1e9:,.2f} B parameters in {cfg.model.dtype}\n"
        f"trainer: {cfg.dims} = {counted(cfg.dims.world_size, 'rank')}"
    )


def _rows(shape: ModelShape, dims: ParallelDims, ranks: Sequence[BuiltRank]) -> list[str]:
    """A row for each pipeline stage with the largest number of bytes of each kind on any rank."""
    kinds = ("weight", "gradient", "optimizer")
    rows = [["trainer ranks", "stage", "layers", "built", "weights", "gradients", "optimizer"]]
    for stage, chunks in enumerate(pipeline_layers(shape.num_layers, dims)):
        first, last = stage * dims.stage_size, (stage + 1) * dims.stage_size - 1
        of_stage = [each for each in ranks if first <= each.sender.rank <= last]
        layers = "+".join(str(len(chunk)) for chunk in chunks)
        sizes = [max(getattr(each, f"{kind}_bytes") for each in of_stage) for kind in kinds]
        cells = [str(stage), layers, str(len(of_stage)), *map(_gigabytes, sizes)]
        rows.append([f"{first}-{last}", *cells])
    return table(rows, left=(0, 2))


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.3f} GB"


def _found(
    cfg: Config, ranks: Sequence[BuiltRank], workers: Sequence[Layout], num_boxes: int
) -> list[str]:
    parameters = sum(len(built.sender.layout.shapes) for built in ranks)
    trained = sum(len(built.adapters.layout.shapes) for built in ranks if built.adapters)
    frozen = _gigabytes(max(built.frozen_bytes for built in ranks))
    kind = "adapters" if cfg.lora.is_served else "weights"
    rows = [
        (f"{len(ranks):,}", f"of {cfg.dims.world_size:,} ranks built, one of each kind"),
        (f"{parameters:,}", "parameters with the planned name, shape, type and place"),
    ]
    if trained:
        rows += [(f"{trained:,}", "trained adapters: every element owned once")]
        rows += [(frozen, "frozen on a rank")]
    rows += [
        (f"{num_boxes:,}", f"boxes of a push: every element of {kind} arrives once"),
        (f"{len(workers):,}", "workers of an engine"),
    ]
    loading = "loading: weight files' elements owned once, ranks' elements filled once"
    return [*facts("as planned", rows), loading]
