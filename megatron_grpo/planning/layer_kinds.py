"""Which layers of a model are alike: those with a dense MLP, those with a mixture of experts."""

from dataclasses import dataclass, replace

from checkpoint_convert import ModelShape


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Successive layers that are alike."""

    layers: range
    """Their indices in the model."""
    shape: ModelShape
    """The model if all of its layers were like these."""

    def count_in(self, *chunks: range) -> int:
        """How many of these layers are in model chunks."""
        return sum(
            len(range(max(self.layers.start, chunk.start), min(self.layers.stop, chunk.stop)))
            for chunk in chunks
        )


def layer_kinds(shape: ModelShape) -> list[LayerKind]:
    """The kinds of layers of a model, in its order: dense ones come before mixtures."""
    if shape.moe is None:
        return [LayerKind(layers=range(shape.num_layers), shape=shape)]
    mixture = replace(shape, moe=replace(shape.moe, num_dense_layers=0))
    kinds = [
        LayerKind(layers=range(shape.num_dense_layers), shape=replace(shape, moe=None)),
        LayerKind(layers=range(shape.num_dense_layers, shape.num_layers), shape=mixture),
    ]
    return [kind for kind in kinds if kind.layers]
