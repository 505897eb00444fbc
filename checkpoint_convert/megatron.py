"""Layouts of Megatron-Core ranks and torch_dist checkpoints. Integers only."""

from collections.abc import Iterator
from itertools import chain

from checkpoint_convert.families import decoder
from checkpoint_convert.families.description import (
    Parameter,
    Tensor,
    shard,
    stacked,
    stored_boxes,
)
from checkpoint_convert.families.vision import vision_tower
from checkpoint_convert.shape import ModelShape, padded_vocab_size
from parallel import (
    Box,
    Coordinates,
    Layout,
    ParallelDims,
    Sender,
    Shape,
    ShardMapping,
    pipeline_layers,
)


def hf_tensors(shape: ModelShape) -> dict[str, Shape]:
    """Name and shape of every tensor of the model, with stacks of experts taken apart."""
    return {each.name: each.whole_shape for each in _sources(shape)}


def file_tensors(shape: ModelShape) -> dict[str, Shape]:
    """Name and shape of every tensor of the weight files, stacks of experts included."""
    return {
        each.stack.name if each.stack else each.name: (
            each.stack.stored_shape if each.stack else each.whole_shape
        )
        for each in _sources(shape)
    }


def file_layout(shape: ModelShape) -> Layout:
    """Layout of the stored tensors (`file_tensors`) in the coordinates of `hf_tensors`.

    A stack has the dimensions of `StackPlace.shape`, in which every expert is a box.
    """
    shapes, pieces = {}, []
    # By name: the parts of a fused tensor are one stored tensor.
    for name, each in {each.name: each for each in _sources(shape)}.items():
        whole = Box.whole(each.whole_shape)
        if each.stack is None:
            shapes[name] = whole.size
            pieces.append(ShardMapping(name, whole, name, whole))
        else:
            shapes[each.stack.name] = each.stack.shape
            box, axes = each.stack.box(whole.size), each.stack.axes
            pieces.append(ShardMapping(each.stack.name, box, name, whole, axes=axes))
    return Layout(shapes, tuple(pieces))


def float32_tensors(shape: ModelShape) -> set[str]:
    """Names of the tensors of the weight files that are float32 in a model of any dtype."""
    return {each.name for each in _sources(shape) if each.is_float32}


def hf_dtypes(shape: ModelShape, dtype: str, float32: str) -> dict[str, str]:
    """Dtype of each Hugging Face tensor in a model of `dtype`.

    `float32` is the name of float32 in the notation of `dtype`: F32 with BF16.
    """
    always = float32_tensors(shape)
    return {name: float32 if name in always else dtype for name in hf_tensors(shape)}


def megatron_layout(
    shape: ModelShape, dims: ParallelDims, at: Coordinates, *, transformer_engine: bool
) -> Layout:
    """Layout of the rank at `at`: its local tensors as boxes of `hf_tensors`.

    Local names are ``{chunk}.{parameter}`` with the model chunk (virtual pipeline stage) of the
    rank and Megatron-Core's parameter name, e.g. ``0.decoder.layers.3.mlp.linear_fc1.weight``. Data
    and context ranks above 0 hold only replicas, except of experts, which are split over them.
    `transformer_engine`: names of norms and groups of experts as in its modules.
    """
    shapes, pieces, zeros = {}, [], []
    for local, parameter in local_parameters(
        shape, dims, at, transformer_engine=transformer_engine
    ):
        rank, size, is_replica = _place(parameter, dims, at)
        part = shard(parameter, rank, size)
        shapes[local] = part.shape
        zeros += [(local, box) for box in part.zeros]
        pieces += [
            ShardMapping(local, p.local_box, p.tensor, p.box, p.is_replica or is_replica)
            for p in part.pieces
        ]
    return Layout(shapes, tuple(pieces), tuple(zeros))


def megatron_sender(
    shape: ModelShape,
    dims: ParallelDims,
    at: Coordinates,
    *,
    transformer_engine: bool,
    layout: Layout | None = None,
) -> Sender:
    """The rank's tensors that can be sent to engines, each with all ranks that hold it.

    `layout` is the rank's `megatron_layout`, if it is already known.
    """
    owners, replica_sets = {}, {}
    for local, parameter in local_parameters(
        shape, dims, at, transformer_engine=transformer_engine
    ):
        owners[local] = _holders(parameter, dims, at)
        if parameter.split is None and not parameter.is_expert:
            replica_sets[local] = dims.tensor
    layout = layout or megatron_layout(shape, dims, at, transformer_engine=transformer_engine)
    return Sender(dims.rank(at), layout, owners, replica_sets)


def local_parameters(
    shape: ModelShape, dims: ParallelDims, at: Coordinates, *, transformer_engine: bool
) -> Iterator[tuple[str, Parameter]]:
    """The unsplit parameters of a rank's model chunks, with their local names."""
    chunks = _chunks(shape, dims, at, transformer_engine=transformer_engine)
    for number, chunk in enumerate(chunks):
        for parameter in chunk:
            yield f"{number}.{parameter.name}", parameter


def first_senders(shape: ModelShape, dims: ParallelDims) -> Iterator[Sender]:
    """Senders of all ranks that own tensors, in rank order; they include every first holder."""
    return (
        megatron_sender(shape, dims, at, transformer_engine=True) for at in _owners(shape, dims)
    )


def _holders(parameter: Parameter, dims: ParallelDims, at: Coordinates) -> range:
    first = dims.stage_size * at.pipeline
    end = first + dims.stage_size
    # Ranks that hold the tied embedding itself send it.
    if parameter.is_copy:
        return range(0)
    if parameter.is_expert:
        place = dims.expert_place(at)
        # In a stage, ranks repeat the same (expert, expert tensor) coordinates with this period:
        # data ranks of experts are the slowest axis.
        offset = place.expert * dims.expert_tensor + place.tensor
        return range(first + offset, end, dims.expert * dims.expert_tensor)
    if parameter.split is None:
        return range(first, end)
    return range(first + at.tensor, end, dims.tensor)


def checkpoint_layout(shape: ModelShape, padded_vocab: int) -> Layout:
    """The tensors of a torch_dist checkpoint, in the coordinates of the weight files.

    They are the same for every mesh that saves them, except for the rows that pad the embedding to
    `padded_vocab`. Layers, if all have equal modules, and the experts of a layer are stacked:
    ``decoder.layers.mlp.linear_fc2.weight`` is [layers, hidden, intermediate], and
    ``decoder.layers.mlp.experts.experts.linear_fc2.weight`` is [layers, experts, hidden,
    intermediate].
    """
    shapes, pieces, zeros = {}, [], []
    for parameter in _whole_model(shape, padded_vocab):
        key = parameter.key or parameter.name
        shapes[key] = (*(size for _, size in parameter.stack_axes), *parameter.shape)
        part = shard(parameter, 0, 1)
        depth = len(parameter.stack_axes)
        # The leading dimensions of a stack have no counterpart in a layer's tensor.
        axes = tuple(range(depth, len(shapes[key]))) if depth else ()
        zeros += [(key, stacked(parameter, box)) for box in part.zeros]
        pieces += [
            ShardMapping(key, stacked(parameter, p.local_box), p.tensor, p.box, axes=axes)
            for p in part.pieces
        ]
    return Layout(shapes, tuple(pieces), tuple(zeros))


def checkpoint_boxes(shape: ModelShape, dims: ParallelDims) -> Iterator[list[tuple[str, Box]]]:
    """For each rank of `dims` that owns anything: (key, box) of the checkpoint tensors it saves."""
    for at in _owners(shape, dims):
        owned = []
        chunks = _chunks(shape, dims, at, transformer_engine=True)
        for parameter in chain.from_iterable(chunks):
            rank, size, is_replica = _place(parameter, dims, at)
            # Without a split, tensor rank 0 saves for all.
            if not (is_replica or parameter.is_copy or (parameter.split is None and rank)):
                key = parameter.key or parameter.name
                owned += [(key, box) for box in stored_boxes(parameter, rank, size)]
        yield owned


def extra_states(shape: ModelShape) -> list[str]:
    """Names under which Megatron-Core's modules look for state that exists only with FP8.

    They include the modules of both Megatron-Core's torch layers and Transformer Engine.
    """
    names = [_extra_state("decoder.final_layernorm", [])]
    experts = range(shape.moe.num_experts if shape.moe else 0)
    for index in range(shape.num_layers):
        stack = [(index, shape.num_layers)] if shape.has_equal_layers else []
        prefix = "decoder.layers." if stack else f"decoder.layers.{index}."
        # Loading fails if the name of a module in use is missing, whichever kind it is.
        for transformer_engine in (False, True):
            for parameter in decoder.layer(
                shape, index, experts, transformer_engine=transformer_engine
            ):
                # Experts' own names are numbered, differently in each kind of module; keys are not.
                name = parameter.key if parameter.is_expert else parameter.name
                if not name.startswith("mlp.router.") and name.endswith(".weight"):
                    module = prefix + name.rpartition(".")[0]
                    names.append(_extra_state(module, [*stack, *parameter.stack_axes]))
    return list(dict.fromkeys(names))


def _extra_state(module: str, stack: list[tuple[int, int]]) -> str:
    """`stack` has (index, size) along each axis on which a checkpoint stacks the module."""
    indices, sizes = zip(*stack or [(0, 1)], strict=True)
    place = ".".join(map(str, indices)), ".".join(map(str, sizes))
    return f"{module}._extra_state/shard_{place[0]}_{place[1]}"


def _place(parameter: Parameter, dims: ParallelDims, at: Coordinates) -> tuple[int, int, bool]:
    """Tensor rank and number of tensor ranks for a parameter, and whether another rank owns it."""
    if parameter.is_expert:
        place = dims.expert_place(at)
        return place.tensor, dims.expert_tensor, place.data > 0
    return at.tensor, dims.tensor, at.data > 0 or at.context > 0


def _owners(shape: ModelShape, dims: ParallelDims) -> list[Coordinates]:
    """Coordinates of ranks that hold anything but replicas; without experts, one per shard."""
    places = [dims.coordinates(rank) for rank in range(dims.world_size)]
    # Experts are split over data ranks, too: those above 0 own some.
    have_experts = [
        any("moe" in shape.modules(layer) for chunk in chunks for layer in chunk)
        for chunks in pipeline_layers(shape.num_layers, dims)
    ]
    return [
        at
        for at in places
        if (at.data == at.context == 0)
        or (have_experts[at.pipeline] and dims.expert_place(at).data == 0)
    ]


def _whole_model(shape: ModelShape, padded_vocab: int) -> list[Parameter]:
    dims, at = ParallelDims(), Coordinates(tensor=0, context=0, data=0, pipeline=0)
    (chunk,) = _chunks(shape, dims, at, transformer_engine=True, padded_vocab=padded_vocab)
    return chunk


def _sources(shape: ModelShape) -> Iterator[Tensor]:
    """Tensors of the weight files; a tensor of fused weights comes once for each of its parts."""
    for parameter in _whole_model(shape, shape.vocab_size):
        yield from parameter.sources


def _chunks(
    shape: ModelShape,
    dims: ParallelDims,
    at: Coordinates,
    *,
    transformer_engine: bool,
    padded_vocab: int | None = None,
) -> list[list[Parameter]]:
    """Unsplit parameters of each model chunk of one rank."""
    padded_vocab = padded_vocab or padded_vocab_size(shape, dims)
    experts = range(0)
    if shape.moe is not None:
        count = shape.moe.num_experts // dims.expert
        rank = dims.expert_place(at).expert
        experts = range(rank * count, (rank + 1) * count)
    chunks = []
    for layers in pipeline_layers(shape.num_layers, dims)[at.pipeline]:
        is_first, is_last = layers.start == 0, layers.stop == shape.num_layers
        chunk = []
        if is_first:
            # In the order of computation, which `policy/skipped_steps.py` walks back to name the
            # first gradient that was not finite.
            chunk = vision_tower(shape.vision) + decoder.embedding(shape, padded_vocab)
        for local_index, index in enumerate(layers):
            chunk += [
                parameter.in_layer(
                    local_index, index, shape.num_layers if shape.has_equal_layers else 0
                )
                for parameter in decoder.layer(
                    shape, index, experts, transformer_engine=transformer_engine
                )
            ]
        if is_last:
            chunk += decoder.head(shape, padded_vocab, shares_embedding=is_first)
        if is_last and shape.trains_mtp:
            chunk += decoder.mtp_layer(shape, experts, transformer_engine=transformer_engine)
        chunks.append(chunk)
    return chunks
