"""The layers of a model by what modules they have: planning counts those of a kind once."""

from dataclasses import dataclass, replace

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


def layer_kinds(shape: ModelShape) -> list[LayerKind]:
    """The kinds of layers of a model, in the order of their first ones."""
    kinds: dict[tuple[Module, ...], list[int]] = {}
    for layer in range(shape.num_layers):
        kinds.setdefault(shape.modules(layer), []).append(layer)
    return [
        LayerKind(layers=frozenset(layers), shape=_of_one_kind(shape, kind))
        for kind, layers in kinds.items()
    ]


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
