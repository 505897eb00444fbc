"""Layouts of a quantised model on the workers of an engine. Integers only.

Of vLLM (0.32, 0.33); SGLang (0.5.23) has another name for experts, which layouts.py gives them.
A worker holds the 8-bit weights where it has others' weights, and beside each the scales of its
blocks: those of the rows and columns that it holds.
"""

from collections.abc import Sequence
from dataclasses import replace

from checkpoint_convert.families.description import Parameter, Tensor
from checkpoint_convert.formats.safetensors_file import QUANTIZED_TORCH_NAMES
from checkpoint_convert.quantized_model import QuantizedModel
from checkpoint_convert.shape import ModelShape
from checkpoint_convert.vllm import EngineDims, engine_parameters, part_of, worker_layout
from parallel import Layout

_NUM_SHOWN = 3


def check_quantized_served(
    shape: ModelShape, dims: EngineDims, model: QuantizedModel, engine: str = "vllm"
) -> None:
    """Raise ValueError if engines could not take the weights of a quantised model as they are."""
    cut = []
    for parameter in filter(model.quantizes, engine_parameters(shape)):
        split = parameter.split
        _, size = part_of(parameter, shape, dims, rank=0)
        if split is None:
            continue
        for source in parameter.sources:
            num_parts = min(size, source.num_heads or size)
            if num_parts > 1 and source.shape[split] // num_parts % (
                model.scheme.block[split] or 1
            ):
                cut.append(f"{source.name} {list(source.shape)}")
    if cut:
        more = f" and {len(cut) - _NUM_SHOWN} more" if len(cut) > _NUM_SHOWN else ""
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
            f"{list(model.scheme.block)} in {', '.join(cut[:_NUM_SHOWN])}{more}: use fewer "
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

    A row has one scale, whoever holds a part of its columns.
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
    first, total = parameter.engine_rows or (0, 0)
    return replace(
        parameter,
        sources=tuple(sources),
        split=parameter.split if is_cut else None,
        engine_rows=(first // rows, -(-total // rows)) if total else None,
        engine_name=parameter.name_in_engine + model.scheme.suffix,
    )
