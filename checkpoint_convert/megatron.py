"""What each Megatron-Core rank holds of a model, as layouts. Integers only."""

from checkpoint_convert.families import dense
from checkpoint_convert.families.description import Parameter, shard
from checkpoint_convert.shape import ModelShape, padded_vocab_size
from parallel import Coordinates, Layout, ParallelDims, Piece, Shape, cover_exactly, pipeline_layers


def hf_tensors(shape: ModelShape) -> dict[str, Shape]:
    """Name and shape of every tensor of the weight files."""
    (chunk,) = _chunks(shape, ParallelDims(), stage=0, fused_norms=False)
    return {source.name: source.shape for parameter in chunk for source in parameter.sources}


def megatron_layout(
    shape: ModelShape, dims: ParallelDims, coordinates: Coordinates, *, fused_norms: bool
) -> Layout:
    """What the rank at `coordinates` holds, in the coordinates of the weight files.

    Local names are ``{chunk}.{parameter}`` with the model chunk (virtual pipeline stage) of the
    rank and Megatron-Core's parameter name, e.g. ``0.decoder.layers.3.mlp.linear_fc1.weight``.
    Data and context ranks above 0 hold replicas only. `fused_norms`: norms are named as
    Transformer Engine does.
    """
    is_replica = coordinates.data > 0 or coordinates.context > 0
    shapes, pieces, zeros = {}, [], []
    for number, chunk in enumerate(_chunks(shape, dims, coordinates.pipeline, fused_norms)):
        for parameter in chunk:
            part = shard(parameter, coordinates.tensor, dims.tensor)
            local = f"{number}.{parameter.name}"
            shapes[local] = part.shape
            zeros += [(local, box) for box in part.zeros]
            pieces += [
                Piece(local, p.local_box, p.tensor, p.box, p.is_replica or is_replica)
                for p in part.pieces
            ]
    return Layout(shapes, tuple(pieces), tuple(zeros))


def check_megatron_layouts(shape: ModelShape, dims: ParallelDims, *, fused_norms: bool) -> None:
    """Raise ValueError unless the ranks together own every element of the weight files once."""
    layouts = [
        megatron_layout(
            shape,
            dims,
            Coordinates(tensor=tensor, context=0, data=0, pipeline=stage),
            fused_norms=fused_norms,
        )
        for stage in range(dims.pipeline)
        for tensor in range(dims.tensor)
    ]
    for layout in layouts:
        layout.check_complete()
    cover_exactly(hf_tensors(shape), layouts)


def _chunks(
    shape: ModelShape, dims: ParallelDims, stage: int, fused_norms: bool
) -> list[list[Parameter]]:
    """Unsplit parameters of each model chunk of one pipeline rank."""
    padded_vocab = padded_vocab_size(shape, dims)
    chunks = []
    for layers in pipeline_layers(shape.num_layers, dims)[stage]:
        is_first, is_last = layers.start == 0, layers.stop == shape.num_layers
        chunk = dense.embedding(shape, padded_vocab) if is_first else []
        for local_index, index in enumerate(layers):
            chunk += dense.layer(shape, index, local_index, dims.tensor, fused_norms=fused_norms)
        if is_last:
            chunk += dense.head(shape, padded_vocab, shares_embedding=is_first)
        chunks.append(chunk)
    return chunks
