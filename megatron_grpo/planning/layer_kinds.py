"""The layers of a model by what modules they have: planning counts those of a kind once."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from checkpoint_convert import ModelShape
from checkpoint_convert.shape import Module


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Layers with the same modules: see `ModelShape.modules`."""

    layers: frozenset[int]
    """Their indices in the model."""
    shape: ModelShape
    """The model with all of its layers of this kind."""

    def count_in(self, *chunks: range) -> int:
        """Layers of this kind in model chunks, such as `range(0, 8)`."""
        return sum(len(self.layers.intersection(chunk)) for chunk in chunks)


@cache
def layer_kinds(shape: ModelShape) -> Sequence[LayerKind]:
    """The kinds of layers of a model, in the order of their first ones."""
    kinds: dict[tuple[Module, ...], list[int]] = {}
    for layer in range(shape.num_layers):
        kinds.setdefault(shape.modules(layer), []).append(layer)
    return [
        LayerKind(layers=frozenset(layers), shape=_of_one_kind(shape, kind))
        for kind, layers in kinds.items()
    ]


def kind_of_layers(kinds: Sequence[LayerKind]) -> dict[int, int]:
    """The index of each layer's kind."""
    return {layer: index for index, kind in enumerate(kinds) for layer in kind.layers}


def one_of_each_kind(
    shape: ModelShape, apart: Callable[[int], Hashable]
) -> tuple[ModelShape, Sequence[Sequence[int]]]:
    """A model with one layer of each kind, in their order, and the layers of `shape` of that kind.

    `apart` tells layers with the same modules apart.
    """
    alike: dict[Hashable, list[int]] = {}
    for layer in range(shape.num_layers):
        alike.setdefault((shape.modules(layer), apart(layer)), []).append(layer)
    layers = [*alike.values()]
    modules = [shape.modules(first) for first, *_ in layers]
    num_dense = sum("mlp" in each for each in modules)
    few = replace(
        shape,
        num_layers=len(layers),
        moe=replace(shape.moe, num_dense_layers=num_dense) if shape.moe else None,
        linear_layers=tuple(layer for layer, each in enumerate(modules) if "linear" in each),
        block_types=tuple(each for (each,) in modules) if shape.block_types else (),
    )
    return few, layers


def mtp_kind(shape: ModelShape) -> ModelShape:
    """A model with all of its layers like that for multi-token prediction."""
    return _of_one_kind(shape, ("attention", "mlp" if shape.moe is None else "moe"))


def _of_one_kind(shape: ModelShape, modules: tuple[Module, ...]) -> ModelShape:
    has_experts, is_linear = "moe" in modules, "linear" in modules
    return replace(
        shape,
        moe=replace(shape.moe, num_dense_layers=0) if shape.moe and has_experts else None,
        linear=shape.linear if is_linear else None,
        linear_layers=tuple(range(shape.num_layers)) if is_linear else (),
        block_types=modules * shape.num_layers if shape.block_types else (),
        trains_mtp=False,
    )
