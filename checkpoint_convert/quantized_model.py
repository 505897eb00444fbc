"""A model whose linear layers are quantised: its 8-bit weights and their scales. Integers only.

Embedding, head, norms, biases and routers stay as they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint_convert.families.description import Parameter
from checkpoint_convert.families.ffn import ROUTER
from checkpoint_convert.peft import WEIGHT
from checkpoint_convert.quantization import Scheme, quantization_config, scheme_of
from checkpoint_convert.shape import ModelShape
from checkpoint_convert.vllm import engine_parameters
from parallel import Shape

_NUM_SHOWN = 8


@dataclass(frozen=True)
class QuantizedModel:
    """How a model is quantised, and which of its tensors."""

    scheme: Scheme
    config: dict[str, Any]
    """quantization_config in config.json."""
    matrices: dict[str, Shape]
    """Shape of each quantised weight, by its name in the weight files."""
    fused: dict[str, tuple[str, ...]]
    """For each, those that are rows of one matrix wherever the model is computed, itself included.

    A rank that holds a part of the queries may hold none of the keys beside them.
    """
    experts: frozenset[str]
    """Which of them are split over other ranks than the rest."""

    @property
    def scales(self) -> dict[str, Shape]:
        """Shape of the scales of each, by their own names."""
        return {self.scale_name(n): self.scheme.grid(size) for n, size in self.matrices.items()}

    def scale_name(self, weight: str) -> str:
        """The name of the scales of a weight."""
        return weight + self.scheme.suffix


def quantized_model(quantization: str, shape: ModelShape, dtype: str) -> QuantizedModel | None:
    """A model of `shape` quantised by one of `SCHEMES`; what is not quantised has `dtype`.

    `dtype` is as safetensors names it. None if `quantization` is ``none``. Raises ValueError,
    naming the weights, if engines could not load them.
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
    linear = [each for each in parameters if is_quantized(each)]
    routers = [each.sources[0].name for each in parameters if each.name == ROUTER]
    ignored = [name.removesuffix(WEIGHT) for name in (*routers, "lm_head.weight")]
    config = quantization_config(quantization, ignored)
    scheme = scheme_of(Path(quantization), config, dtype)
    _check_fits(linear, scheme)
    matrices = {source.name: source.whole_shape for each in linear for source in each.sources}
    names = [tuple({source.name: None for source in each.sources}) for each in linear]
    fused = {name: together for together in names for name in together}
    of_experts = [source.name for each in linear if each.is_expert for source in each.sources]
    return QuantizedModel(scheme, config, matrices, fused, frozenset(of_experts))


def is_quantized(parameter: Parameter) -> bool:
    """Whether an engine's parameter is a weight that is quantised: that of a linear layer."""
    is_of_layer = ".layers." in parameter.sources[0].name
    return len(parameter.shape) == 2 and is_of_layer and parameter.name != ROUTER


def _check_fits(linear: list[Parameter], scheme: Scheme) -> None:
    """Engines put some weights on top of each other: a block must not reach into the next one."""
    rows = scheme.block[0] or 1
    cut = [
        f"{name} {list(size)}" for each in linear for name, size in _upper(each) if size[0] % rows
    ]
    if cut:
        more = f" and {len(cut) - _NUM_SHOWN} more" if len(cut) > _NUM_SHOWN else ""
        raise ValueError(
            f"quantization fp8 has blocks of {rows} rows, into which these weights do not divide, "
            f"and engines put others below them: {', '.join(cut[:_NUM_SHOWN])}{more}: use "
            "fp8_channel or int8"
        )


def _upper(parameter: Parameter) -> Iterator[tuple[str, Shape]]:
    """Name and shape of the sources below which an engine has others in the same parameter."""
    first, total = parameter.engine_rows or (0, parameter.shape[0])
    row = first
    for source in parameter.sources:
        row += source.shape[0]
        if row < total or (parameter.is_expert and len(parameter.sources) > 1):
            yield source.name, source.shape
