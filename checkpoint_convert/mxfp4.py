"""MXFP4 of gpt-oss: numbers of 4 bits, each 32 with a scale that is a power of two. Needs no torch.

In place of a stack of matrices `x` [experts, inputs, outputs], files have `x_blocks` [experts,
outputs, inputs / 32, 16], bytes of two numbers, and `x_scales` [experts, outputs, inputs / 32],
exponents plus 127. `formats/dequantized.py` computes.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from checkpoint_convert.formats.safetensors_file import TensorPlace
from parallel import Box, Shape

BLOCK = 32
"""Numbers with one scale."""
_BLOCKS, _SCALES = "_blocks", "_scales"
_STORED = "U8"
"""The dtype of both in the files."""


def is_method_of(config: Mapping[str, Any]) -> bool:
    """Whether config.json says that its weights are in MXFP4."""
    table = config.get("quantization_config")
    return isinstance(table, dict) and table.get("quant_method") == "mxfp4"


@dataclass(frozen=True)
class Mxfp4Scheme:
    """How the experts of a folder are quantised; all else has a dtype of its own."""

    read_as: str
    """The dtype of the numbers that are read: that of the model in config.json."""

    def stored_names(self, names: Collection[str]) -> set[str]:
        """The names in the files of tensors with these names."""
        return {*names, *(name + end for name in names for end in (_BLOCKS, _SCALES))}


@dataclass(frozen=True, slots=True)
class Mxfp4Place(TensorPlace):
    """Where the blocks of a stack are stored, and where their scales.

    `shape` is the stack's, and `dtype` that of the numbers that are read.
    """

    scale_name: str
    scale: TensorPlace

    def stored_shape(self) -> Shape:
        """The shape of the numbers in the order in which they are stored: inputs last."""
        experts, inputs, *outputs = self.shape
        return (experts, *outputs, inputs)

    def stored_box(self, box: Box) -> Box:
        """A box of the stack in that order."""
        (expert, first, *start), (experts, inputs, *size) = box.start, box.size
        return Box((expert, *start, first), (experts, *size, inputs))

    def as_blocks(self) -> TensorPlace:
        """View the bytes as they are stored, [..., blocks, 16]."""
        *outer, inputs = self.stored_shape()
        return replace(self, shape=(*outer, inputs // BLOCK, BLOCK // 2))

    def as_scales(self) -> TensorPlace:
        """View the scales of the blocks, [..., blocks]."""
        *outer, inputs = self.stored_shape()
        return replace(self.scale, shape=(*outer, inputs // BLOCK))


def with_blocks(
    places: Mapping[str, TensorPlace], scheme: Mxfp4Scheme
) -> tuple[dict[str, TensorPlace], list[str]]:
    """The tensors with an `Mxfp4Place` for each that is quantised, and what is wrong with these."""
    found, faults = dict(places), []
    for blocks_name, blocks in places.items():
        if not blocks_name.endswith(_BLOCKS):
            continue
        name = blocks_name.removesuffix(_BLOCKS)
        del found[blocks_name]
        scale = found.pop(name + _SCALES, None)
        if scale is None:
            faults.append(f"{name + _SCALES} of {blocks_name} in {blocks.file.name} is missing")
            continue
        wanted = {"blocks": (blocks, (*scale.shape, BLOCK // 2)), "scales": (scale, scale.shape)}
        wrong = [
            f"{name}_{kind} in {place.file.name} is {place.dtype} {list(place.shape)}; it must be "
            f"{_STORED} {list(shape)}"
            for kind, (place, shape) in wanted.items()
            if place.dtype != _STORED or place.shape != shape or len(scale.shape) != 3
        ]
        faults += wrong
        if not wrong:
            experts, outputs, num_blocks = scale.shape
            found[name] = Mxfp4Place(
                *(blocks.file, scheme.read_as, (experts, num_blocks * BLOCK, outputs)),
                *(blocks.offset, blocks.num_bytes),
                scale_name=name + _SCALES,
                scale=scale,
            )
    return found, faults
