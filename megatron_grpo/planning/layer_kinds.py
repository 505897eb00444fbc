"""Groups a model's layers by their modules: planning counts each kind of layer once."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from checkpoint_convert import ModelShape
from checkpoint_convert.shape import Module
from megatron_grpo.config.config import Config
from megatron_grpo.planning.attention import Attention, LatentAttention, SparseAttention
from megatron_grpo.planning.block import Block
from megatron_grpo.planning.linear_attention import DeltaRule, Mamba2
from megatron_grpo.planning.mlp import Experts, Mlp
from megatron_grpo.planning.precision import Precision, fp8_layers, model_precision, precision
from parallel import pipeline_layers


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Layers with the same modules: see `ModelShape.modules`."""

    layers: frozenset[int]
    """Their indices in the model."""
    shape: ModelShape
    """The model as if all of its layers were of this kind."""

    def count_in(self, *chunks: range) -> int:
        """Layers of this kind in model chunks, such as `range(0, 8)`."""
        return sum(len(self.layers.intersection(chunk)) for chunk in chunks)

    @cached_property
    def one_layer(self) -> ModelShape:
        """The model with a single layer, of this kind."""
        return replace(self.shape, num_layers=1)

    @cached_property
    def blocks(self) -> Sequence[Block]:
        """Modules of one layer."""
        return [_block(module, self.shape) for module in self.shape.modules(0)]


@cache
def layer_kinds(shape: ModelShape) -> Sequence[LayerKind]:
    """Kinds of a model's layers, in the order of their first layers."""
    kinds: dict[tuple[Module, ...], list[int]] = {}
    for layer in range(shape.num_layers):
        kinds.setdefault(shape.modules(layer), []).append(layer)
    return [
        LayerKind(layers=frozenset(layers), shape=_of_one_kind(shape, kind))
        for kind, layers in kinds.items()
    ]


def _block(module: Module, shape: ModelShape) -> Block:
    match module:
        case "attention" if shape.indexer is not None:
            return SparseAttention(shape)
        case "attention":
            return Attention(shape) if shape.latent is None else LatentAttention(shape)
        case "linear":
            return Mamba2(shape) if shape.has_mamba else DeltaRule(shape)
        case "mlp":
            return Mlp(shape)
        case "moe":
            return Experts(shape)


def kinds_of_layers(cfg: Config, shape: ModelShape) -> Sequence[tuple[Precision, LayerKind]]:
    """Kinds of layers with their precision: a kind with FP8 and bfloat16 layers gives two."""
    fp8 = frozenset(fp8_layers(cfg, shape.num_layers))
    both = [
        (each, replace(kind, layers=layers))
        for kind in layer_kinds(shape)
        for each, layers in (
            (precision(cfg), kind.layers & fp8),
            (model_precision(cfg), kind.layers - fp8),
        )
    ]
    return [(each, kind) for each, kind in both if kind.layers]


def kinds_of_stage(
    cfg: Config, shape: ModelShape, stage: int
) -> Sequence[tuple[Precision, LayerKind]]:
    """Entries of `kinds_of_layers` that a pipeline stage has."""
    chunks = pipeline_layers(shape.num_layers, cfg.dims)[stage]
    return [each for each in kinds_of_layers(cfg, shape) if each[1].count_in(*chunks)]


def kind_of_layers(kinds: Sequence[LayerKind]) -> dict[int, int]:
    """Map each layer to the index of its kind."""
    return {layer: index for index, kind in enumerate(kinds) for layer in kind.layers}


def one_of_each_kind(
    shape: ModelShape, apart: Callable[[int], Hashable]
) -> tuple[ModelShape, Sequence[Sequence[int]]]:
    """A model with one layer of each kind, and the layers of `shape` of each kind.

    Layers with equal modules and equal `apart(layer)` are of one kind.
    """
    alike: dict[Hashable, list[int]] = {}
    for layer in range(shape.num_layers):
        alike.setdefault((shape.modules(layer), apart(layer)), []).append(layer)
    layers = [*alike.values()]
    modules = [shape.modules(first) for first, *_ in layers]
    dense = tuple(layer for layer, each in enumerate(modules) if "mlp" in each)
    few = replace(
        shape,
        num_layers=len(layers),
        moe=replace(shape.moe, dense_layers=dense) if shape.moe else None,
        linear_layers=tuple(layer for layer, each in enumerate(modules) if "linear" in each),
        block_types=tuple(each for (each,) in modules) if shape.block_types else (),
    )
    return few, layers


def mtp_kind(shape: ModelShape) -> LayerKind:
    """The multi-token-prediction layer, as the only kind of a model."""
    modules: tuple[Module, ...] = ("attention", "mlp" if shape.moe is None else "moe")
    return LayerKind(layers=frozenset({0}), shape=_of_one_kind(shape, modules))


def _of_one_kind(shape: ModelShape, modules: tuple[Module, ...]) -> ModelShape:
    has_experts, is_linear = "moe" in modules, "linear" in modules
    return replace(
        shape,
        moe=replace(shape.moe, dense_layers=()) if shape.moe and has_experts else None,
        linear=shape.linear if is_linear else None,
        linear_layers=tuple(range(shape.num_layers)) if is_linear else (),
        block_types=modules * shape.num_layers if shape.block_types else (),
        trains_mtp=False,
    )
