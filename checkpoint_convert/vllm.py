"""Layouts of the workers of a vLLM engine (0.32, 0.33). Integers only.

vLLM is not imported. Instead, `check_engine` compares these layouts with what a running engine
reports, so that a vLLM version with other parameters fails at startup, not as falling rewards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from checkpoint_convert.families import FAMILIES, decoder
from checkpoint_convert.families.description import Parameter, Shard
from checkpoint_convert.families.vision import vision_tower
from checkpoint_convert.shape import ModelShape, split_obstacles
from parallel import Box, Layout, Shape, ShardMapping, divisors
from parallel.words import counted

VOCAB_MULTIPLE = 64
"""vLLM's DEFAULT_VOCAB_PADDING_SIZE: the vocabulary's multiple, for any number of ranks."""


@dataclass(frozen=True, kw_only=True)
class EngineDims:
    """Parallel sizes of one engine."""

    tensor: int = 1
    """Number of workers over which every layer's matrices are split."""
    data: int = 1
    """Number of groups of `tensor` workers. Each group has its own requests and all weights except
    experts, which all workers of the engine share."""
    expert_parallel: bool = False
    """Whether workers hold whole experts, instead of a part of every expert's matrices."""
    gathers_mlps: bool = False
    """Whether all workers of all groups also share MLPs and shared experts, and each holds equally
    many experts, as in SGLang."""

    @property
    def num_workers(self) -> int:
        """Workers of all groups; worker r belongs to group r // tensor."""
        return self.data * self.tensor


def engine_layouts(shape: ModelShape, dims: EngineDims) -> list[Layout]:
    """Layouts of one engine's workers, in the coordinates of the weight files, by rank.

    Local names and shapes are those of the worker's `pushable_parameters`, such as
    ``model.layers.3.self_attn.qkv_proj.weight``; a tied head is not among them.
    `ShardMapping.is_replica` marks parts that a worker of lower rank also holds. Raises ValueError
    like `check_engine_dims`.
    """
    check_engine_dims(shape, dims)
    parameters = engine_parameters(shape)
    return [worker_layout(parameters, shape, dims, rank) for rank in range(dims.num_workers)]


def first_worker_layout(shape: ModelShape, dims: EngineDims) -> Layout:
    """Layout of an engine's first worker, in a fraction of the time; no worker holds more."""
    check_engine_dims(shape, dims)
    return worker_layout(engine_parameters(shape), shape, dims, rank=0)


def engine_parameters(shape: ModelShape) -> list[Parameter]:
    """Parameters of an engine, before they are split over workers."""
    padded_vocab = _padded_vocab(shape)
    parameters = decoder.embedding(shape, padded_vocab)
    experts = range(shape.moe.num_experts if shape.moe else 0)
    for index in range(shape.num_layers):
        parameters += decoder.layer(shape, index, experts, transformer_engine=True)
    # A tied head is the embedding itself: no parameter of its own.
    parameters += decoder.head(shape, padded_vocab, shares_embedding=True)
    if shape.trains_mtp:
        parameters += decoder.mtp_layer(shape, experts, transformer_engine=True)
    parameters += vision_tower(shape.vision, in_engine=True)
    if names := FAMILIES[shape.family].engines.vllm.names:
        parameters = [each.renamed_in_engine(_renamed(each, names)) for each in parameters]
    return [part for each in parameters for part in each.in_engine()]


def _renamed(parameter: Parameter, names: Mapping[str, str]) -> str:
    name = parameter.name_in_engine
    for part, own in names.items():
        name = name.replace(part, own)
    return name


def _padded_vocab(shape: ModelShape) -> int:
    return -(-shape.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def worker_layout(
    parameters: Sequence[Parameter], shape: ModelShape, dims: EngineDims, rank: int
) -> Layout:
    """Layout of worker `rank` for these `parameters` of the model."""
    experts = _experts(shape, dims, rank)
    shapes: dict[str, Shape] = {}
    pieces: list[ShardMapping] = []
    zeros: list[tuple[str, Box]] = []
    for parameter in parameters:
        name = parameter.name_in_engine
        number, size = part_of(parameter, shape, dims, rank)
        if not parameter.is_expert:
            part = worker_shard(parameter, number, size)
            is_copy = number != rank  # worker `number` holds it, too
            first, num_rows = parameter.vllm.rows or (0, part.shape[0])
            shapes[name] = (num_rows, *part.shape[1:])
            pieces += [
                replace(p, local_box=_from(p.local_box, first), is_replica=p.is_replica or is_copy)
                for p in part.pieces
            ]
            zeros += [(name, box) for box in part.zeros]
        elif parameter.stack_axes[0][0] in experts:
            # The experts of a worker are stacked in one tensor with an additional first dimension.
            part = worker_shard(parameter, number, size)
            index = parameter.stack_axes[0][0] - experts.start
            if parameter.vllm.alternates:
                part = _alternating(part)
            shapes[name] = (len(experts), *part.shape)
            # Workers' outputs of the second linear layer are summed: the bias must count once.
            if number > 0 and parameter.vllm.is_added_once:
                zeros.append((name, Box((index, 0), (1, *part.shape))))
            else:
                pieces += [_in_stack(piece, index) for piece in part.pieces]
    return Layout(shapes, tuple(pieces), tuple(zeros))


def part_of(
    parameter: Parameter, shape: ModelShape, dims: EngineDims, rank: int
) -> tuple[int, int]:
    """Number of the part of a split parameter that worker `rank` holds, and the number of parts."""
    if parameter.is_expert:
        # Groups share experts: these are split over all workers of the engine.
        return (0, 1) if dims.expert_parallel else (rank, dims.num_workers)
    names = FAMILIES[shape.family].experts
    is_shared = names is not None and f".{names.shared}." in parameter.sources[0].name
    if dims.gathers_mlps and ".mlp." in parameter.sources[0].name:
        return rank, dims.num_workers
    if is_shared and _has_whole_shared_expert(shape, dims):
        return 0, 1
    return rank % dims.tensor, dims.tensor


def _experts(shape: ModelShape, dims: EngineDims, rank: int) -> range:
    """Experts of a worker; if they do not divide evenly, the first workers hold one more."""
    if shape.moe is None:
        return range(0)
    if not dims.expert_parallel:
        return range(shape.moe.num_experts)
    base, remainder = divmod(shape.moe.num_experts, dims.num_workers)
    start = rank * base + min(rank, remainder)
    return range(start, start + base + (rank < remainder))


def _has_whole_shared_expert(shape: ModelShape, dims: EngineDims) -> bool:
    """Whether every worker holds the whole shared expert."""
    # vLLM's `use_sequence_parallel_moe`: a group's tokens are distributed over its workers before
    # the experts, so each worker computes all of the shared expert, for its own tokens.
    deals_out = dims.expert_parallel and dims.tensor > 1 and dims.data > 1
    return deals_out and FAMILIES[shape.family].engines.vllm.has_whole_shared_expert


def worker_shard(parameter: Parameter, rank: int, size: int) -> Shard:
    """Worker `rank`'s share of every source, one after the other, each followed by zeros."""
    name = parameter.name_in_engine
    # Without names, so that all layers share `_cut`'s cache.
    sources = tuple([(source.shape, source.num_heads) for source in parameter.sources])
    split = parameter.split if parameter.vllm.split is None else parameter.vllm.split
    parts, zeros, whole = _cut(sources, split, parameter.zero_rows, rank, size)
    pieces = [
        ShardMapping(name, local, source.name, _from(stored, source.first_row), is_replica)
        for number, local, stored, is_replica in parts
        for source in (parameter.sources[number],)
    ]
    return Shard(whole, tuple(pieces), zeros)


@cache
def _cut(
    sources: tuple[tuple[Shape, int | None], ...],
    split: int | None,
    zero_rows: int,
    rank: int,
    size: int,
) -> tuple[tuple[tuple[int, Box, Box, bool], ...], tuple[Box, ...], Shape]:
    """The parts of a worker's parameter, its boxes of zeros, and its shape.

    Each part is the number of its source, its boxes in the parameter and in the source, and whether
    a worker of lower rank also holds it.
    """
    parts, zeros = [], []
    row = 0
    for number, (shape, num_heads) in enumerate(sources):
        dim = split or 0
        padded = (*shape[:dim], shape[dim] + zero_rows, *shape[dim + 1 :])
        box, is_replica = Box.whole(padded), rank > 0
        if split is not None:
            # With fewer key-value heads than workers, neighbouring workers hold the same head.
            num_parts = min(size, num_heads or size)
            part, copy = divmod(rank, size // num_parts)
            extent = box.size[split] // num_parts
            box = box.narrowed(split, part * extent, extent)
            is_replica = copy > 0
        # What lies beyond the stored tensor is padding.
        num_stored = min(max(shape[dim] - box.start[dim], 0), box.size[dim])
        local = Box((row, *(0 for _ in shape[1:])), box.size)
        if num_stored < box.size[dim]:
            zeros.append(local.narrowed(dim, num_stored, box.size[dim] - num_stored))
            local, stored = (each.narrowed(dim, 0, num_stored) for each in (local, box))
        else:
            stored = box
        if num_stored:
            parts.append((number, local, stored, is_replica))
        row += box.size[0]
    return tuple(parts), tuple(zeros), (row, *box.size[1:])


def _from(box: Box, row: int) -> Box:
    """Shift a box by `row` rows, from a part of a tensor to the whole."""
    return Box((box.start[0] + row, *box.start[1:]), box.size) if row else box


def _alternating(part: Shard) -> Shard:
    """Let the rows of two sources alternate: [rows of each, 2, columns]."""
    rows, *columns = part.shape
    rows //= 2
    axes = (0, *range(2, len(part.shape) + 1))

    def moved(piece: ShardMapping) -> ShardMapping:
        (start, *others), (size, *extents) = piece.local_box.start, piece.local_box.size
        box = Box((start % rows, start // rows, *others), (size, 1, *extents))
        return replace(piece, local_box=box, axes=axes)

    return Shard((rows, 2, *columns), tuple(map(moved, part.pieces)), part.zeros)


def _in_stack(piece: ShardMapping, index: int) -> ShardMapping:
    box = Box((index, *piece.local_box.start), (1, *piece.local_box.size))
    axes = tuple(axis + 1 for axis in piece.axes or range(len(piece.box.start)))
    return ShardMapping(piece.local, box, piece.tensor, piece.box, piece.is_replica, axes)


def check_engine_dims(shape: ModelShape, dims: EngineDims) -> None:
    """Raise ValueError, naming the legal sizes, when an engine of `dims` cannot split the model."""
    if dims.data > 1 and shape.moe is None:
        raise ValueError(
            f"an engine of data_parallel_size({dims.data}) shares experts between its groups, and "
            "the model has none: set 1, and start more engines"
        )
    obstacles = _obstacles(shape, dims)
    if obstacles:
        groups = f" and data_parallel_size({dims.data})" if dims.data > 1 else ""
        raise ValueError(
            f"an engine of tensor_parallel_size({dims.tensor}){groups} cannot split the model: it "
            + " and ".join(obstacles)
            + f"; legal values are {engine_sizes(shape, dims)}"
        )


def engine_sizes(shape: ModelShape, dims: EngineDims) -> list[int]:
    """Every value of `dims.tensor` with which an engine can split the model, ascending."""
    candidates = divisors(shape.num_attention_heads)
    return [size for size in candidates if not _obstacles(shape, replace(dims, tensor=size))]


def _obstacles(shape: ModelShape, dims: EngineDims) -> list[str]:
    further = {"padded vocabulary": _padded_vocab(shape)}
    # vLLM replicates key-value heads under a norm over all heads only if it splits the norm
    # (MiniMaxText01RMSNormTP), and not in gpt-oss, which divides their number by the workers.
    has_whole_norms = not FAMILIES[shape.family].engines.vllm.has_split_norms
    if shape.has_sinks or (shape.norms_all_heads and has_whole_norms):
        further["num_key_value_heads"] = shape.num_key_value_heads
    obstacles = split_obstacles(shape, dims.tensor, further)
    if shape.moe is None:
        return obstacles
    workers = "" if dims.data == 1 else f"with {dims.num_workers} workers "
    if dims.expert_parallel and dims.num_workers > shape.moe.num_experts:
        obstacles.append(f"{workers}is more than num_experts({shape.moe.num_experts})")
    size = shape.moe.intermediate_size
    # Of alternating stacks, vLLM requires even matrices even where workers hold whole experts.
    is_stacked = shape.moe.stacks == "alternating"
    if (is_stacked or not dims.expert_parallel) and size % dims.num_workers:
        obstacles.append(f"{workers}does not divide intermediate_size of the experts({size})")
    is_even = is_stacked or dims.gathers_mlps
    if is_even and dims.expert_parallel and shape.moe.num_experts % dims.num_workers:
        obstacles.append(f"{workers}does not divide num_experts({shape.moe.num_experts})")
    if dims.gathers_mlps and dims.data > 1:
        shared = {"intermediate_size of the shared expert": shape.moe.shared_intermediate_size}
        dense = {"intermediate_size": shape.intermediate_size if shape.num_dense_layers else 0}
        split = {name: size for name, size in (dense | shared).items() if size % dims.num_workers}
        obstacles += [f"{workers}does not divide {name}({size})" for name, size in split.items()]
    return obstacles


def engine_dtypes(shape: ModelShape, dtype: str) -> dict[str, str]:
    """The dtype of every parameter of an engine of `dtype` (such as ``bfloat16``), by name."""
    return {
        each.name_in_engine: "float32" if each.vllm.is_float32 else dtype
        for each in engine_parameters(shape)
    }


EngineReport = Mapping[str, tuple[Sequence[int], str]]
"""Shape and dtype (such as ``bfloat16``) of each of a worker's parameters, by name."""


def check_engine(
    layouts: Sequence[Layout], reports: Sequence[EngineReport], dtypes: Mapping[str, str]
) -> None:
    """Compare the layouts of an engine's workers with their reports, both ordered by rank.

    `dtypes` are those of `engine_dtypes`. Raises ValueError that names every parameter that the
    layouts do not cover, that the engine lacks, or whose shape or dtype differs.
    """
    if len(layouts) != len(reports):
        raise ValueError(
            f"the engine has {counted(len(reports), 'worker')} but was planned with "
            f"{len(layouts)}: start it with the sizes of the config"
        )
    faults = [
        f"worker {rank}: {fault}"
        for rank, (layout, report) in enumerate(zip(layouts, reports, strict=True))
        for fault in _differences(layout, report, dtypes)
    ]
    if faults:
        raise ValueError(
            "the engine's parameters do not match the model that is trained, so its weights "
            "cannot be pushed:\n  " + "\n  ".join(faults)
        )


def _differences(layout: Layout, report: EngineReport, dtypes: Mapping[str, str]) -> list[str]:
    faults = [
        f"{name} {list(layout.shapes[name])} is missing"
        for name in layout.shapes
        if name not in report
    ]
    for name, (size, found) in report.items():
        if name not in layout.shapes:
            faults.append(f"{name} {list(size)} is filled by no weight of the model")
        elif tuple(size) != layout.shapes[name]:
            faults.append(f"{name} has shape {list(size)} instead of {list(layout.shapes[name])}")
        elif found != dtypes[name]:
            faults.append(f"{name} has dtype {found} instead of {dtypes[name]}")
    return faults
