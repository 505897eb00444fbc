"""A model whose linear layers are quantised: its weights, their scales and layouts. Integers only.

Embedding, head, norms, biases and routers stay as they are. A worker of vLLM (0.32, 0.33) holds
8-bit weights in place of the originals and, next to each, the scales of the blocks in its rows and
columns. SGLang (0.5.23) names experts differently: see `engine_weights/layouts.py`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkpoint_convert.families import FAMILIES
from checkpoint_convert.families.description import Parameter, Tensor
from checkpoint_convert.families.ffn import ROUTER
from checkpoint_convert.formats.safetensors_file import QUANTIZED_TORCH_NAMES
from checkpoint_convert.megatron import megatron_layout
from checkpoint_convert.peft import WEIGHT
from checkpoint_convert.quantized.scheme import REGEX, Scheme, quantization_config, scheme_of
from checkpoint_convert.shape import ModelShape
from checkpoint_convert.vllm import EngineDims, engine_parameters, part_of, worker_layout
from parallel import Box, Layout, ParallelDims, Shape, ShardMapping

HEAD = "lm_head"
_UNQUANTIZED = (ROUTER, "eh_proj.weight")
"""Matrices of layers that engines never quantise, by name endings in Megatron."""
_IGNORE = "rollout.quantization_ignore (--ignore of checkpoint-convert)"


@dataclass(frozen=True)
class QuantizedModel:
    """How a model is quantised, and which of its weights are."""

    scheme: Scheme
    config: dict[str, Any]
    """quantization_config in config.json."""
    matrices: dict[str, Shape]
    """Shape of each quantised weight, by its name in the weight files."""
    fused: dict[str, tuple[str, ...]]
    """For each weight, all weights fused with it into one matrix (q, k and v), itself included.

    A rank that holds a part of the queries may hold none of the keys.
    """
    experts: frozenset[str]
    """Weights of experts, which are split over other ranks than the rest."""

    @property
    def scales(self) -> dict[str, Shape]:
        """Shape of each weight's agreed scales, by their names."""
        return {self.scale_name(n): self.agreed_shape(n) for n in self.matrices}

    def scale_name(self, weight: str) -> str:
        """Name of the agreed scales of a weight, which all ranks with a part of it hold.

        They are the scales of its blocks or, if the scheme has one, the scale of the whole matrix;
        then each rank has the scales of its own blocks.
        """
        return self.scheme.scale_names(weight)[-1]

    def agreed_block(self, weight: str) -> Shape:
        """The rows and columns that share an agreed scale."""
        size = self.matrices[weight]
        return size if self.scheme.whole else self.scheme.block_in(size)

    def agreed_shape(self, weight: str) -> Shape:
        return (1,) if self.scheme.whole else self.scheme.grid(self.matrices[weight])

    def quantizes(self, parameter: Parameter) -> bool:
        """Whether this parameter of an engine is quantised."""
        return parameter.sources[0].name in self.matrices


def quantized_model(
    quantization: str, shape: ModelShape, dtype: str, ignore: Sequence[str] = ()
) -> QuantizedModel | None:
    """A model of `shape` quantised by one of `SCHEMES`; unquantised tensors have `dtype`.

    `dtype` is as safetensors names it. `ignore` lists modules to leave unquantised: names in the
    weight files, or `re:` and a regular expression of how names begin, as in compressed-tensors.
    None if `quantization` is ``none``. Raises ValueError, naming the weights, if engines could not
    load them.
    """
    if quantization == "none":
        return None
    if shape.moe is not None and shape.moe.stacks is not None:
        raise ValueError(
            f"quantization {quantization} is not supported for {shape.family}, whose weight files "
            "stack experts: leave it out"
        )
    if kind := "linear" if shape.linear else "sparse" if shape.indexer else None:
        raise ValueError(
            f"quantization {quantization} is not supported for {shape.family}, which has {kind} "
            "attention: leave it out"
        )
    parameters = [*engine_parameters(shape)]
    others = _ignored(parameters, ignore, shape.family)
    linear = [p for p in parameters if _is_matrix(p) and p.sources[0].name not in others]
    kept = [each.sources[0].name for each in parameters if each.name.endswith(_UNQUANTIZED)]
    ignored = [*(name.removesuffix(WEIGHT) for name in (*kept, *others)), HEAD]
    config = quantization_config(quantization, ignored)
    # The path only names the scheme in errors.
    scheme = scheme_of(Path(quantization), config, dtype)
    _check_fits(linear, scheme)
    matrices = {source.name: source.whole_shape for each in linear for source in each.sources}
    if not matrices:
        raise ValueError(
            f"{_IGNORE} names all linear layers, which leaves none for quantization "
            f"{quantization}: set only one of the two"
        )
    fused = _fused(linear)
    of_experts = [source.name for each in linear if each.is_expert for source in each.sources]
    return QuantizedModel(scheme, config, matrices, fused, frozenset(of_experts))


def _fused(linear: list[Parameter]) -> dict[str, tuple[str, ...]]:
    """Weights fused with each weight in engines, which fuse more matrices than ranks do."""
    together: dict[str, dict[str, None]] = {}
    for each in linear:  # an engine's experts are stacked, not fused
        key = each.sources[0].name if each.is_expert else each.name_in_engine
        names = together.setdefault(key, {})
        names |= {source.name: None for source in each.sources}
    return {name: tuple(names) for names in together.values() for name in names}


def _is_matrix(parameter: Parameter) -> bool:
    """Whether a parameter of an engine is the weight of a linear layer."""
    is_of_layer = ".layers." in parameter.sources[0].name
    is_kept = parameter.name.endswith(_UNQUANTIZED)
    return len(parameter.shape) == 2 and is_of_layer and not is_kept


def _ignored(
    parameters: Sequence[Parameter], ignore: Sequence[str], family: str
) -> dict[str, None]:
    """The weights of linear layers that are not to be quantised: see `quantized_model`.

    Raises ValueError for a name without a module, and for a name without the rest of its group:
    engines quantise the parts of a matrix, and the experts of a layer, together.
    """
    if not ignore:
        return {}
    modules = {source.name.removesuffix(WEIGHT) for each in parameters for source in each.sources}
    known, named = {*modules, HEAD}, set[str]()
    for name in ignore:
        found = {name} & known
        if name.startswith(REGEX):
            found = set(filter(_pattern(name).match, known))
        if not found:
            raise ValueError(f"{_IGNORE}: the model has no module {name!r}")
        named |= found
    together: dict[str, list[str]] = {}
    for each in filter(_is_matrix, parameters):
        name = each.name_in_engine
        key = name.rpartition(".")[0] if each.is_expert else name
        together.setdefault(key, []).extend(source.name for source in each.sources)
    for names in together.values():
        rest = [name for name in names if name.removesuffix(WEIGHT) not in named]
        if rest and len(rest) < len(names):
            raise ValueError(
                f"{_IGNORE} lacks {_shown(rest)}, which engines quantise together with others that "
                "it names: name all of them or none"
            )
    experts = (each.sources[0].name for each in parameters if each.is_expert)
    found = {name for name in experts if name.removesuffix(WEIGHT) in named}
    if found and FAMILIES[family].engines.vllm.renames_experts:
        raise ValueError(
            f"{_IGNORE} has {_shown(sorted(found))}: in {family}, vLLM looks for experts under "
            "another name than that of the weight files, and would quantise them: leave them out"
        )
    linear = dict.fromkeys(name for names in together.values() for name in names)
    return {name: None for name in linear if name.removesuffix(WEIGHT) in named}


def _pattern(name: str) -> re.Pattern[str]:
    try:
        return re.compile(name.removeprefix(REGEX))
    except re.error as error:
        raise ValueError(f"{_IGNORE}: {name!r} is no regular expression: {error}") from None


def _check_fits(linear: list[Parameter], scheme: Scheme) -> None:
    """Raise ValueError if a block would reach from one weight of a fused matrix into the next."""
    rows, columns = scheme.block[0] or 1, scheme.block[1] or 1
    cut = [
        f"{name} {list(size)}" for each in linear for name, size in _upper(each) if size[0] % rows
    ]
    if cut:
        raise ValueError(
            f"quantization fp8 has blocks of {rows} rows; these weights do not divide into blocks, "
            f"but engines fuse others below them: {_shown(cut)}: use fp8_channel or int8"
        )
    sizes = {source.name: source.whole_shape for each in linear for source in each.sources}
    cut = [f"{name} {list(size)}" for name, size in sizes.items() if size[1] % columns]
    if scheme.whole and cut:
        raise ValueError(
            f"quantization nvfp4 needs the columns of weights to be a multiple of {columns}: "
            f"{_shown(cut)}: use fp8_channel or int8"
        )


def _shown(weights: list[str], most: int = 8) -> str:
    more = f" and {len(weights) - most} more" if len(weights) > most else ""
    return ", ".join(weights[:most]) + more


def _upper(parameter: Parameter) -> Iterator[tuple[str, Shape]]:
    """Sources with others below them in the same engine parameter: name and shape."""
    first, total = parameter.vllm.rows or (0, parameter.shape[0])
    row = first
    for source in parameter.sources:
        row += source.shape[0]
        if row < total or (parameter.is_expert and len(parameter.sources) > 1):
            yield source.name, source.shape


def quantized_layout(
    layout: Layout, model: QuantizedModel, tensor_rank: int, expert_tensor_rank: int
) -> Layout:
    """Layout of a rank of the quantised model, from the rank's `layout` before quantisation.

    With a part of a weight, a rank holds the agreed scales of all weights fused with it; the first
    such tensor rank owns them. Raises ValueError, naming a weight, for a part of a block.
    """
    shapes, pieces, scales = {**layout.shapes}, [], {}
    for piece in layout.pieces:
        if piece.tensor not in model.matrices:
            pieces.append(piece)
            continue
        if not model.scheme.whole:
            pieces.append(piece)
        else:  # NVFP4: each rank has its own packed numbers and block scales
            # An earlier piece of the same local tensor (q, k, v) may have removed it.
            shapes.pop(piece.local, None)
            size = Box.whole(layout.shapes[piece.local])
            for suffix, block in model.scheme.cut.items():
                pieces.append(_divided(piece, suffix, block))
                shapes[piece.local + suffix] = over(size, block).size
        rank = expert_tensor_rank if piece.tensor in model.experts else tensor_rank
        # A rank with a part of q may hold none of k: its layout still has the scales of k.
        for weight in model.fused[piece.tensor]:
            name, box = model.scale_name(weight), Box.whole(model.agreed_shape(weight))
            scales[name] = ShardMapping(name, box, name, box, piece.is_replica or rank > 0)
    shapes |= {name: piece.box.size for name, piece in scales.items()}
    return Layout(shapes, (*pieces, *scales.values()), layout.zeros)


def check_ranks(shape: ModelShape, dims: ParallelDims, model: QuantizedModel) -> None:
    """Raise ValueError, like `quantized_layout`, if ranks could not export a quantised model."""
    if model.scheme.whole:
        # One rank for each stage: the parts of its others have the same size, and begin at
        # multiples.
        for first in range(0, dims.world_size, dims.stage_size):
            at = dims.coordinates(first)
            layout = megatron_layout(shape, dims, at, transformer_engine=False)
            quantized_layout(layout, model, at.tensor, dims.expert_place(at).tensor)


def _divided(piece: ShardMapping, suffix: str, block: Shape) -> ShardMapping:
    """Map a piece to the tensor with one element for each block of the piece."""
    whole = (*piece.box.start, *piece.box.size, *piece.local_box.start)
    if any(n % size for n, size in zip(whole, 3 * block, strict=True)):
        raise ValueError(
            f"quantization nvfp4: a rank has {list(piece.box.size)} of {piece.tensor}, which cuts "
            "its blocks of 16 columns: use fewer tensor ranks, fp8_channel or int8"
        )
    assert not piece.axes, f"{piece.tensor} is stored as it is in the weight files"
    local, box = over(piece.local_box, block), over(piece.box, block)
    return ShardMapping(piece.local + suffix, local, piece.tensor + suffix, box, piece.is_replica)


def over(box: Box, block: Shape) -> Box:
    """Map a box of whole blocks to the tensor with one element for each block."""
    start, size = (
        tuple(n // extent for n, extent in zip(each, block, strict=True))
        for each in (box.start, box.size)
    )
    return Box(start, size)


def check_quantized_served(
    shape: ModelShape, dims: EngineDims, model: QuantizedModel, engine: str = "vllm"
) -> None:
    """Raise ValueError if an engine of `dims` would cut blocks of a quantised model."""
    cut = []
    for parameter in filter(model.quantizes, engine_parameters(shape)):
        split = parameter.split
        _, size = part_of(parameter, shape, dims, rank=0)
        if split is None:
            continue
        for source in parameter.sources:
            # Workers beyond the number of key-value heads hold copies.
            num_parts = min(size, source.num_heads or size)
            if num_parts > 1 and source.shape[split] // num_parts % (
                model.scheme.block[split] or 1
            ):
                cut.append(f"{source.name} {list(source.shape)}")
    if cut:
        whole = {
            "vllm": ", rollout.vllm.enable_expert_parallel: true",
            "sglang": f", rollout.sglang.ep_size: {dims.num_workers}",
        }[engine]
        others = {"vllm": "fp8_channel or int8", "sglang": "or rollout.engine=vllm"}[engine]
        cuts_experts = any(".experts." in each for each in cut)
        instead = f"{whole if cuts_experts else ''}, {others}"
        raise ValueError(
            f"rollout.quantization fp8: the {dims.num_workers} workers of an engine "
            f"(rollout.tensor_parallel_size {dims.tensor}) would cut blocks of "
            f"{list(model.scheme.block)} in {_shown(cut, 3)}: use fewer "
            f"workers{instead}"
        )


def quantized_engine_layouts(
    layouts: Sequence[Layout], shape: ModelShape, dims: EngineDims, model: QuantizedModel
) -> list[Layout]:
    """Layouts of the quantised model, given the `engine_layouts` before it is quantised."""
    parameters = [
        _scales(each, model) for each in engine_parameters(shape) if model.quantizes(each)
    ]
    scales = [worker_layout(parameters, shape, dims, rank) for rank in range(dims.num_workers)]
    return [
        # `b` has no zeros: matrices of linear layers are not padded.
        Layout({**a.shapes, **b.shapes}, (*a.pieces, *b.pieces), a.zeros)
        for a, b in zip(layouts, scales, strict=True)
    ]


def quantized_engine_dtypes(
    dtypes: dict[str, str], shape: ModelShape, model: QuantizedModel
) -> dict[str, str]:
    """The dtype of every parameter of an engine, from those before the model is quantised."""
    found = dict(dtypes)
    for parameter in engine_parameters(shape):
        if model.quantizes(parameter):
            name = parameter.name_in_engine
            found[name] = QUANTIZED_TORCH_NAMES[model.scheme.dtype]
            found[name + model.scheme.suffix] = "float32"
    return found


def _scales(parameter: Parameter, model: QuantizedModel) -> Parameter:
    """The scales of a weight, as a parameter that is split like it.

    A scale of a whole row is replicated where workers split columns.
    """
    rows = model.scheme.block[0] or 1
    sources = [
        Tensor(
            model.scale_name(each.name),
            model.scheme.grid(each.shape),
            each.num_heads,
            rows=(each.first_row // rows, model.scheme.grid(each.whole_shape)[0]),
        )
        for each in parameter.sources
    ]
    is_cut = parameter.split is not None and model.scheme.block[parameter.split] is not None
    first, total = parameter.vllm.rows or (0, 0)
    return replace(
        parameter,
        sources=tuple(sources),
        split=parameter.split if is_cut else None,
        vllm=replace(
            parameter.vllm,
            name=parameter.name_in_engine + model.scheme.suffix,
            rows=(first // rows, -(-total // rows)) if total else None,
        ),
    )
