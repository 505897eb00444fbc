"""Sizes of the device mesh, and conversion between ranks and mesh coordinates. Integers only."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

from parallel.words import counted


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Position of one rank on each mesh axis."""

    tensor: int
    context: int
    data: int
    pipeline: int


@dataclass(frozen=True, kw_only=True)
class ExpertPlace:
    """Position of one rank on the axes that split the experts of a mixture."""

    tensor: int
    expert: int
    data: int


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Sizes of every mesh axis of the trainer.

    Ranks are laid out in Megatron-Core's default order ``tp-cp-ep-dp-pp``: the tensor axis varies
    fastest, so that it stays inside a node, and the pipeline axis slowest. `virtual_pipeline` is
    the number of model chunks per pipeline rank (interleaved 1F1B) and takes no ranks.

    Experts are laid out differently over the same ranks of a pipeline stage: `expert_tensor` ranks
    split the matrices of an expert, `expert` such groups split the experts, and the remaining
    factor is the number of copies.
    """

    tensor: int = 1
    context: int = 1
    data: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 0
    """0 is replaced by the value of `tensor`."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of pipeline rank 0, in all its chunks; None: an equal share of the layers."""
    num_layers_in_last_pipeline_stage: int | None = None

    def __post_init__(self) -> None:
        if self.expert_tensor == 0:
            object.__setattr__(self, "expert_tensor", self.tensor)
        axes = ("tensor", "context", "data", "pipeline", "virtual_pipeline", "expert")
        for axis in (*axes, "expert_tensor"):
            if getattr(self, axis) < 1:
                raise ValueError(
                    f"{axis} parallel size is {getattr(self, axis)}: it must be at least 1"
                )
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(
                f"virtual_pipeline({self.virtual_pipeline}) interleaves pipeline stages and needs "
                "pipeline > 1: set pipeline to 2 or more, or virtual_pipeline to 1"
            )
        if self.stage_size % self.expert_tensor:
            raise ValueError(
                f"expert_tensor({self.expert_tensor}) must divide the "
                f"{counted(self.stage_size, 'rank')} of a pipeline stage, tp({self.tensor}) * "
                f"cp({self.context}) * dp({self.data}): legal values are "
                f"{divisors(self.stage_size)}"
            )
        expert_groups = self.stage_size // self.expert_tensor
        if expert_groups % self.expert:
            raise ValueError(
                f"expert({self.expert}) must divide tp({self.tensor}) * cp({self.context}) * "
                f"dp({self.data}) / expert_tensor({self.expert_tensor}) = {expert_groups}: legal "
                f"values are {divisors(expert_groups)}"
            )

    def __str__(self) -> str:
        return f"tp({self.tensor}) * pp({self.pipeline}) * cp({self.context}) * dp({self.data})"

    @property
    def world_size(self) -> int:
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def stage_size(self) -> int:
        """Number of ranks of one pipeline stage."""
        return self.tensor * self.context * self.data

    def check_world_size(self, world_size: int) -> None:
        """Raise ValueError, naming every factor, if the mesh does not have `world_size` ranks."""
        if self.world_size != world_size:
            model = self.tensor * self.pipeline * self.context
            legal = (
                f"data parallel size {world_size // model} would fill them"
                if world_size % model == 0
                else f"the number of ranks must be a multiple of tp*pp*cp = {model}"
            )
            raise ValueError(f"{self} = {self.world_size} != world size {world_size}: {legal}")

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of `rank`; the inverse of the method `rank`."""
        assert 0 <= rank < self.world_size, f"rank {rank} of {self.world_size}"
        rank, tensor = divmod(rank, self.tensor)
        rank, context = divmod(rank, self.context)
        pipeline, data = divmod(rank, self.data)
        return Coordinates(tensor=tensor, context=context, data=data, pipeline=pipeline)

    def rank(self, at: Coordinates) -> int:
        """Rank at these coordinates; the inverse of `coordinates`."""
        return at.tensor + self.tensor * (
            at.context + self.context * (at.data + self.data * at.pipeline)
        )

    def expert_place(self, at: Coordinates) -> ExpertPlace:
        """Position of the rank at these coordinates on the axes of the experts."""
        in_stage = at.tensor + self.tensor * (at.context + self.context * at.data)
        # Fastest first: parts of an expert, experts, copies.
        group, tensor = divmod(in_stage, self.expert_tensor)
        data, expert = divmod(group, self.expert)
        return ExpertPlace(tensor=tensor, expert=expert, data=data)

    def replica_ranks(self, data: int) -> list[int]:
        """Ranks of one model copy (all of tensor x context x pipeline), in ascending order."""
        inner = self.tensor * self.context
        return [
            (stage * self.data + data) * inner + i
            for stage in range(self.pipeline)
            for i in range(inner)
        ]


def divisors(n: int) -> list[int]:
    """All divisors of `n`, ascending: the legal values named in error messages."""
    return [d for d in range(1, n + 1) if n % d == 0]


@cache
def pipeline_layers(num_layers: int, dims: ParallelDims) -> Sequence[Sequence[range]]:
    """Global layer indices of every model chunk, as ``[pipeline rank][virtual stage]``.

    Chunks follow the interleaved order: virtual stage v of rank p is the (v * pipeline + p)-th
    chunk of the model. `dims` may fix the layers of the first and the last rank; the other ranks
    share the rest equally. If layers do not divide evenly over chunks, the middle chunks take one
    more, then the first: the first also holds the embedding, and the last the head, which costs
    more. Where Megatron-Core accepts `dims`, its own layout is the same.
    """
    num_chunks = dims.pipeline * dims.virtual_pipeline
    if num_layers < num_chunks:
        raise ValueError(
            f"{counted(num_layers, 'layer')} cannot fill pipeline({dims.pipeline}) * "
            f"virtual_pipeline({dims.virtual_pipeline}) = {num_chunks} stages: "
            f"use at most {counted(num_layers, 'stage')}"
        )
    sizes = [0] * num_chunks
    for ranks, layers in _shares(num_layers, dims):
        own = [chunk for chunk in range(num_chunks) if chunk % dims.pipeline in ranks]
        # False sorts first: middle chunks, then the first, then the last.
        own.sort(key=lambda chunk: (chunk == num_chunks - 1, chunk == 0))
        base, remainder = divmod(layers, len(own))
        for place, chunk in enumerate(own):
            sizes[chunk] = base + (place < remainder)
    ends = list(accumulate(sizes))
    chunks = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return [chunks[rank :: dims.pipeline] for rank in range(dims.pipeline)]


def _shares(num_layers: int, dims: ParallelDims) -> list[tuple[list[int], int]]:
    """Pairs of pipeline ranks and the number of layers that they share equally.

    Raises ValueError if the layers that `dims` fixes for the first and the last rank leave a chunk
    without a layer, or a layer without a chunk.
    """
    ends = {
        0: dims.num_layers_in_first_pipeline_stage,
        dims.pipeline - 1: dims.num_layers_in_last_pipeline_stage,
    }
    given = {rank: layers for rank, layers in ends.items() if layers is not None}
    others = [rank for rank in range(dims.pipeline) if rank not in given]
    shares = [([rank], layers) for rank, layers in given.items()]
    if others:
        shares.append((others, num_layers - sum(given.values())))
    is_complete = sum(layers for _, layers in shares) == num_layers
    if is_complete and all(
        layers >= len(ranks) * dims.virtual_pipeline for ranks, layers in shares
    ):
        return shares
    even = replace(
        dims, num_layers_in_first_pipeline_stage=None, num_layers_in_last_pipeline_stage=None
    )
    legal = [sum(map(len, chunks)) for chunks in pipeline_layers(num_layers, even)]
    names = {rank: f"num_layers_in_{'last' if rank else 'first'}_pipeline_stage" for rank in given}
    raise ValueError(
        f"{counted(num_layers, 'layer')} cannot be split over pipeline({dims.pipeline}) * "
        f"virtual_pipeline({dims.virtual_pipeline}) chunks with "
        + " and ".join(f"{names[rank]}({layers})" for rank, layers in given.items())
        + ": every chunk needs a layer, and every layer a chunk; legal is, for example, "
        + " with ".join(f"{names[rank]}={legal[rank]}" for rank in given)
    )
