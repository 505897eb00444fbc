"""Which parts of a quantised model each worker of a vLLM engine (0.32, 0.33) holds. Integers only.

A worker holds the 8-bit weights where it has others' weights, and beside each the scales of its
blocks: those of the rows and columns that it holds.
"""

from collections.abc import Sequence
from dataclasses import replace

from checkpoint_convert.families.description import Parameter, Tensor
from checkpoint_convert.formats.safetensors_file import QUANTIZED_TORCH_NAMES
from checkpoint_convert.quantized_model import QuantizedModel, is_quantized
from checkpoint_convert.shape import ModelShape
from checkpoint_convert.vllm import EngineDims, engine_parameters, worker_shard
from parallel import Layout, Shape, ShardMapping

_NUM_SHOWN = 3


def check_quantized_served(shape: ModelShape, dims: EngineDims, model: QuantizedModel) -> None:
    """Raise ValueError if engines could not take the weights of a quantised model as they are."""
    if shape.latent is not None or shape.moe is not None:
        kind = "latent attention" if shape.latent is not None else "a mixture of experts"
        raise ValueError(
            f"rollout.quantization: engines rearrange quantised weights of a model with {kind}, so "
            "that they cannot be pushed yet: set it to none"
        )
    cut = []
    for parameter in filter(is_quantized, engine_parameters(shape)):
        for source in parameter.sources:
            num_parts = min(dims.tensor, source.num_heads or dims.tensor)
            split = parameter.split or 0
            if num_parts > 1 and source.shape[split] // num_parts % (
                model.scheme.block[split] or 1
            ):
                cut.append(f"{source.name} {list(source.shape)}")
    if cut:
        more = f" and {len(cut) - _NUM_SHOWN} more" if len(cut) > _NUM_SHOWN else ""
        raise ValueError(
            f"rollout.quantization fp8: engines of rollout.tensor_parallel_size {dims.tensor} "
            f"would cut blocks of {list(model.scheme.block)} in "
            f"{', '.join(cut[:_NUM_SHOWN])}{more}: use fewer workers, fp8_channel or int8"
        )


def quantized_engine_layouts(
    layouts: Sequence[Layout], shape: ModelShape, dims: EngineDims, model: QuantizedModel
) -> list[Layout]:
    """What the workers hold that have the `engine_layouts` of the model before it is quantised."""
    parameters = [_scales(each, model) for each in engine_parameters(shape) if is_quantized(each)]
    return [_with_scales(layout, parameters, dims, rank) for rank, layout in enumerate(layouts)]


def quantized_engine_dtypes(
    dtypes: dict[str, str], shape: ModelShape, model: QuantizedModel
) -> dict[str, str]:
    """The dtype of every parameter of an engine, from those before the model is quantised."""
    found = dict(dtypes)
    for parameter in engine_parameters(shape):
        if is_quantized(parameter):
            name = _name(parameter)
            found[name] = QUANTIZED_TORCH_NAMES[model.scheme.dtype]
            found[name + model.scheme.suffix] = "float32"
    return found


def _name(parameter: Parameter) -> str:
    return parameter.engine_name or parameter.sources[0].name


def _scales(parameter: Parameter, model: QuantizedModel) -> Parameter:
    """The scales of a weight, as a parameter that is split like it.

    A row has one scale, whoever holds a part of its columns.
    """
    sources = [
        Tensor(model.scale_name(each.name), model.scheme.grid(each.shape), each.num_heads)
        for each in parameter.sources
    ]
    is_cut = parameter.split is not None and model.scheme.block[parameter.split] is not None
    return replace(
        parameter,
        sources=tuple(sources),
        split=parameter.split if is_cut else None,
        engine_name=_name(parameter) + model.scheme.suffix,
    )


def _with_scales(
    layout: Layout, scales: Sequence[Parameter], dims: EngineDims, rank: int
) -> Layout:
    shapes: dict[str, Shape] = {}
    pieces: list[ShardMapping] = []
    for parameter in scales:
        part = worker_shard(parameter, rank, dims.tensor)
        shapes[parameter.engine_name] = part.shape
        pieces += part.pieces
    return Layout({**layout.shapes, **shapes}, (*layout.pieces, *pieces), layout.zeros)
