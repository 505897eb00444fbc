"""Targets of adapters: linear layers, and a rank's parts of them; names and integers only."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isclose
from typing import Literal

from checkpoint_convert import ModelShape, hf_tensors, megatron_layout
from checkpoint_convert.families import FAMILIES
from checkpoint_convert.families.mla import INDEXER
from checkpoint_convert.megatron import local_parameters
from checkpoint_convert.peft import (
    WEIGHT,
    StoredAdapter,
    a_name,
    adapter_tensors,
    b_name,
    read_adapter,
)
from megatron_grpo.config.lora import LoraConfig
from parallel import Box, Coordinates, Layout, ParallelDims, Sender, Shape, ShardMapping
from parallel.words import counted

LOCAL_NAME = ".lora"
"""Suffix of an adapter, after the name of its linear layer."""

Split = Literal["rows", "columns", "whole"]
"""How tensor ranks hold a weight: split by outputs, split by inputs, or whole on each."""
_SPLITS: dict[int | None, Split] = {0: "rows", 1: "columns", None: "whole"}


@dataclass(frozen=True)
class Part:
    """Rows of one weight of the files within a rank's fused weight."""

    module: str
    """Such as ``model.layers.0.mlp.up_proj``."""
    rows: tuple[int, ...]
    """Rows in the fused weight, in the order of B's rows."""
    boxes: tuple[Box, ...]
    """`rows` as boxes of the weight in the files."""


@dataclass(frozen=True)
class Target:
    """A rank's part of a linear layer of Megatron that gets adapters."""

    weight: str
    """Local name of the weight, such as ``0.decoder.layers.3.mlp.linear_fc1.weight``."""
    split: Split
    parts: tuple[Part, ...]
    """One part per weight with an adapter; without rows on this rank, a part has no boxes."""
    columns: Box
    """[1, columns]: A's columns on this rank, as a box of a whole row."""
    shapes: Mapping[str, Shape]
    """Shapes of the whole weights, by module."""

    @property
    def name(self) -> str:
        """Local name of the adapter, such as ``0.decoder.layers.3.mlp.linear_fc1.lora``."""
        return self.weight.removesuffix(WEIGHT) + LOCAL_NAME

    def adapter_shapes(self, rank: int) -> dict[str, Shape]:
        """Shapes of A [parts * rank, columns] and B [rows, rank] on this rank, by local name."""
        rows = sum(len(part.rows) for part in self.parts)
        return {
            f"{self.name}.a": (len(self.parts) * rank, self.columns.size[-1]),
            f"{self.name}.b": (rows, rank),
        }

    def pieces(self, rank: int, at: Coordinates) -> Iterator[ShardMapping]:
        """Map the local A and B to PEFT's tensors, for an adapter of `rank` on the rank at `at`."""
        row, copied = 0, at.data > 0 or at.context > 0
        has_a, has_b = (self.split == split or not at.tensor for split in ("columns", "rows"))
        width = self.columns.size[-1]
        for number, part in enumerate(self.parts):
            yield ShardMapping(
                f"{self.name}.a",
                Box((number * rank, 0), (rank, width)),
                a_name(part.module),
                Box((0, self.columns.start[-1]), (rank, width)),
                copied or not has_a,
            )
            for box in part.boxes:
                yield ShardMapping(
                    f"{self.name}.b",
                    Box((row, 0), (box.size[0], rank)),
                    b_name(part.module),
                    Box((box.start[0], 0), (box.size[0], rank)),
                    copied or not has_b,
                )
                row += box.size[0]


def check_lora(cfg: LoraConfig, shape: ModelShape, tensor: int) -> None:
    """Raise ValueError if `lora` does not fit the model, or its split over `tensor` ranks."""
    if not cfg.r:
        return
    if FAMILIES[shape.family].file_names:
        raise ValueError(
            f"lora.r {cfg.r} is not supported for a {shape.family}: PEFT names adapters by "
            "transformers' modules, and its weight files have other names; set lora.r=0"
        )
    found = targets_of(cfg, shape)
    layers = {".".join(name.split(".")[:3]) for name in found}
    if len(layers) < shape.num_layers:
        raise ValueError(
            f"lora.target_modules gives adapters to {len(layers)} of {shape.num_layers} layers: "
            "name a module that each layer has, such as o_proj"
        )
    ends = {name.rpartition(".")[2] for name in found} & {"q_proj", "k_proj", "v_proj"}
    if shape.latent is None and len(ends) in (1, 2) and tensor > shape.num_key_value_heads:
        raise ValueError(
            f"parallel.tensor_parallel_size {tensor} is above the model's "
            f"{counted(shape.num_key_value_heads, 'key-value head')}, and some ranks have no rows "
            f"of {', '.join(sorted(ends))}: name q_proj, k_proj and v_proj in lora.target_modules"
        )


def starting_adapter(cfg: LoraConfig, shape: ModelShape) -> StoredAdapter | None:
    """Read `lora.adapter_path`; ValueError if it is not of the form that `lora` describes."""
    if cfg.adapter_path is None:
        return None
    stored = read_adapter(cfg.adapter_path, hf_tensors(shape))
    stored_text = f"lora.adapter_path {cfg.adapter_path} has adapters"
    if stored.rank != cfg.r:
        raise ValueError(
            f"{stored_text} of rank {stored.rank}, but lora.r is {cfg.r}: set lora.r={stored.rank}"
        )
    if not isclose(stored.scale, cfg.scale):
        alpha = stored.scale * cfg.lora_alpha / cfg.scale
        raise ValueError(
            f"{stored_text} of scale {stored.scale:g}, but lora.lora_alpha {cfg.lora_alpha:g} "
            f"gives {cfg.scale:g}: set lora.lora_alpha={alpha:g}"
        )
    wanted = targets_of(cfg, shape)
    if differing := sorted({*wanted} ^ {*stored.modules}):
        raise ValueError(
            f"{stored_text} on other layers than lora.target_modules, such as {differing[0]}: "
            + _advice(cfg, shape, stored.modules)
        )
    return stored


def _advice(cfg: LoraConfig, shape: ModelShape, modules: Sequence[str]) -> str:
    """Suggest the `lora.target_modules` that match exactly these modules, or a merge."""
    ends = tuple(dict.fromkeys(name.rpartition(".")[2] for name in modules))
    described = cfg.model_copy(update={"target_modules": ends, "exclude_modules": ()})
    try:
        can_describe = {*targets_of(described, shape)} == {*modules}
    except ValueError:  # experts, or a table
        can_describe = False
    if can_describe:
        unset = " lora.exclude_modules=[]" * bool(cfg.exclude_modules)
        return f"set lora.target_modules=[{','.join(ends)}]{unset}"
    return (
        "no lora.target_modules selects exactly its layers; merge the adapter into the model "
        "(checkpoint-convert merge), and leave lora.adapter_path out"
    )


def targets_of(cfg: LoraConfig, shape: ModelShape) -> list[str]:
    """Modules of the weight files that get adapters; raises the ValueErrors of
    `LoraConfig.targets`."""
    linears: dict[str, None] = {}  # an ordered set: several sources may be rows of one weight
    others: dict[str, None] = {}
    one = Coordinates(tensor=0, context=0, data=0, pipeline=0)
    for _, parameter in local_parameters(shape, ParallelDims(), one, transformer_engine=True):
        is_linear = parameter.name.startswith("decoder.layers.") and not parameter.is_expert
        is_linear = is_linear and ".router." not in parameter.name
        is_linear = is_linear and INDEXER not in parameter.name
        for source in parameter.sources:
            if len(source.shape) == 2:
                module = source.name.removesuffix(WEIGHT)
                (linears if is_linear else others)[module] = None
    return cfg.targets([*linears], [*others])


def peft_tensors(cfg: LoraConfig, shape: ModelShape) -> dict[str, Shape]:
    """Name and shape of every tensor of the adapter file that PEFT saves."""
    return adapter_tensors(targets_of(cfg, shape), cfg.r, hf_tensors(shape))


def local_targets(
    cfg: LoraConfig, shape: ModelShape, layout: Layout, dims: ParallelDims, at: Coordinates
) -> Iterator[Target]:
    """Targets in the layers of the rank at `at`; `layout`: its weights."""
    wanted, whole = set(targets_of(cfg, shape)), hf_tensors(shape)
    pieces: dict[tuple[str, str], list[ShardMapping]] = defaultdict(list)
    for piece in layout.pieces:
        pieces[piece.local, piece.tensor].append(piece)
    # `transformer_engine` changes the names of norms and experts only, which have no adapters.
    for name, parameter in local_parameters(shape, dims, at, transformer_engine=True):
        sources = {x.name: x for x in parameter.sources if x.name.removesuffix(WEIGHT) in wanted}
        if not sources or not name.endswith(WEIGHT):
            continue
        split = _SPLITS[parameter.split]
        columns = Box((0, 0), (1, parameter.shape[1]))
        if split == "columns":
            (piece,) = pieces[name, parameter.sources[0].name]
            columns = Box((0, piece.box.start[1]), (1, piece.box.size[1]))
        parts = tuple(_part(source, pieces[name, source]) for source in sources)
        modules = [part.module for part in parts]
        shapes = {module: whole[module + WEIGHT] for module in modules}
        yield Target(name, split, parts, columns, shapes)


def adapter_sender(
    targets: Iterable[Target], rank: int, dims: ParallelDims, at: Coordinates
) -> Sender:
    """Describe the adapters of `rank` that the rank at `at` can send, in PEFT's coordinates.

    A local name is, for example, ``0.decoder.layers.3.mlp.linear_fc1.lora.a``.
    """
    shapes: dict[str, Shape] = {}
    pieces: list[ShardMapping] = []
    owners: dict[str, range] = {}
    replica_sets: dict[str, int] = {}
    first = dims.stage_size * at.pipeline
    stage = range(first, first + dims.stage_size)
    for target in targets:
        shapes |= target.adapter_shapes(rank)
        pieces += target.pieces(rank, at)
        for x, split in (("a", "columns"), ("b", "rows")):
            local = f"{target.name}.{x}"
            if target.split == split:
                owners[local] = stage[at.tensor :: dims.tensor]
            else:  # whole on each tensor rank: all of them can send
                owners[local], replica_sets[local] = stage, dims.tensor
    return Sender(dims.rank(at), Layout(shapes, tuple(pieces)), owners, replica_sets)


def planned_adapters(
    cfg: LoraConfig, shape: ModelShape, dims: ParallelDims, at: Coordinates
) -> Sender:
    """`adapter_sender` of the rank at `at`, from sizes alone."""
    layout = megatron_layout(shape, dims, at, transformer_engine=True)
    return adapter_sender(local_targets(cfg, shape, layout, dims, at), cfg.r, dims, at)


def first_adapter_senders(
    cfg: LoraConfig, shape: ModelShape, dims: ParallelDims
) -> Iterator[Sender]:
    """`planned_adapters` of the first data and context rank of each shard, in order of rank."""
    for at in map(dims.coordinates, range(dims.world_size)):
        if at.data == at.context == 0:
            yield planned_adapters(cfg, shape, dims, at)


def _part(tensor: str, pieces: Sequence[ShardMapping]) -> Part:
    pieces = sorted(pieces, key=lambda piece: piece.local_box.start)
    ranges = [range(p.local_box.start[0], p.local_box.end[0]) for p in pieces]
    return Part(
        tensor.removesuffix(WEIGHT), tuple(chain(*ranges)), tuple(piece.box for piece in pieces)
    )
