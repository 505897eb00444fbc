"""Where quantised matrices and their scales are in weight files. Needs no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from checkpoint_convert.formats.safetensors_file import TensorPlace
from checkpoint_convert.quantized.scheme import (
    DEEPSEEK_SUFFIX,
    MXFP4_BLOCK,
    MXFP4_BLOCKS,
    MXFP4_SCALES,
    Mxfp4Scheme,
    Scheme,
)
from parallel import Box, Shape

# Scales and zero points with which engines quantise activations, keys and values.
_ACTIVATION_SUFFIXES = (
    *(".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale"),
    *(".input_zero_point", ".output_zero_point", ".input_global_scale"),
)
_ZERO_POINT = ".weight_zero_point"
_BYTES = "U8"
"""Dtype of both numbers and scales of MXFP4 in the files."""


@dataclass(frozen=True, slots=True)
class QuantizedPlace(TensorPlace):
    """Where the numbers and scales of a quantised matrix are stored; `shape` is the matrix's."""

    name: str
    scheme: Scheme
    block: Shape
    scale: TensorPlace
    """One per block, as a matrix; a block at the end may be partial."""
    whole: TensorPlace | None
    """The scale of the whole matrix, if the scheme has one."""

    @property
    def files(self) -> set[Path]:
        """Files that hold its numbers and scales."""
        return {place.file for place in (self, self.scale, self.whole) if place is not None}

    @property
    def numbers(self) -> TensorPlace:
        """The numbers as they are stored."""
        rows, columns = self.shape
        size = (rows, columns // self.scheme.per_byte)
        return TensorPlace(self.file, self.dtype, size, self.offset, self.num_bytes)

    def stored_box(self, box: Box) -> Box:
        """Box of the stored numbers, in whole bytes, that includes `box` of the matrix."""
        (row, column), count = box.start, self.scheme.per_byte
        first, end = column // count, -(-box.end[1] // count)
        return Box((row, first), (box.size[0], end - first))

    def blocks_of(self, box: Box) -> Box:
        """Box of the scales of all blocks that `box` of the matrix reaches into."""
        first = tuple(a // size for a, size in zip(box.start, self.block, strict=True))
        end = tuple(-(-b // size) for b, size in zip(box.end, self.block, strict=True))
        return Box(first, tuple(b - a for a, b in zip(first, end, strict=True)))

    def elements_of(self, blocks: Box) -> Box:
        """Box of the matrix with the elements of these `blocks`."""
        start = tuple(a * size for a, size in zip(blocks.start, self.block, strict=True))
        end = tuple(
            min(b * size, n) for b, size, n in zip(blocks.end, self.block, self.shape, strict=True)
        )
        return Box(start, tuple(b - a for a, b in zip(start, end, strict=True)))


def with_scales(
    places: Mapping[str, TensorPlace], scheme: Scheme
) -> tuple[dict[str, TensorPlace], list[str]]:
    """Join quantised weights and their scales to `QuantizedPlace`; also return faults of scales.

    Tensors that only quantisation needs are left out.
    """
    found = {n: place for n, place in places.items() if not n.endswith(_ACTIVATION_SUFFIXES)}
    faults = []
    for name, place in places.items():
        if name.endswith(_ZERO_POINT):
            faults.append(f"{name} in {place.file.name}: only symmetric quantisation is supported")
            del found[name]
        elif place.dtype == scheme.dtype and name in found:
            numbers = found.pop(name)
            weight = name.removesuffix(scheme.numbers)
            *outer, columns = numbers.shape or (1,)
            # Stays if its scales are wrong, so that the weight is not reported as missing, too.
            found[weight] = replace(numbers, shape=(*outer, columns * scheme.per_byte))
            # DeepSeek's suffix in any scheme: a weight may have scales by two names.
            names = dict.fromkeys([*scheme.scale_names(weight), weight + DEEPSEEK_SUFFIX])
            scales = {n: found.pop(n) for n in names if n in found}
            try:
                if not name.endswith(scheme.numbers):
                    raise ValueError(
                        f"{name} in {place.file.name} is {place.dtype}: its numbers "
                        f"must be in {name}{scheme.numbers}"
                    )
                if scheme.numbers and weight in places:
                    raise ValueError(
                        f"{weight} in {places[weight].file.name} is stored twice: also as {name}"
                    )
                found[weight] = _with_scales(weight, found[weight], scales, scheme)
            except ValueError as error:
                faults.append(str(error))
    return found, faults


def _with_scales(
    name: str, place: TensorPlace, scales: Mapping[str, TensorPlace], scheme: Scheme
) -> QuantizedPlace:
    if scheme.is_either and name + DEEPSEEK_SUFFIX in scales:
        scheme = replace(scheme, suffix=DEEPSEEK_SUFFIX)
    if len(scales) > len(scheme.scale_names(name)):
        named = " and ".join(scales)
        raise ValueError(f"{name} in {place.file.name} has scales twice: {named}")
    for scale_name in scheme.scale_names(name):
        if scale_name not in scales:
            raise ValueError(
                f"{name}{scheme.numbers} in {place.file.name} is {place.dtype}, but {scale_name} "
                "is missing"
            )
    if len(place.shape) != 2:
        raise ValueError(f"{name} in {place.file.name} is quantised, but no matrix")
    block, grid = scheme.block_in(place.shape), scheme.grid(place.shape)
    if scheme.whole and place.shape[1] % block[1]:
        raise ValueError(
            f"{name}{scheme.numbers} in {place.file.name} has rows of {place.shape[1]} numbers, "
            f"which is no multiple of a block's {block[1]}"
        )
    shapes: list[Shape] = [grid]
    if scheme.block[1] is None:  # a scale per tensor or row needs no second dimension
        shapes += [grid[:1], ()] if scheme.block[0] is None else [grid[:1]]
    of_blocks, *whole = scales.items()
    require = f"blocks of {list(block)} in a matrix of {list(place.shape)} require {list(grid)}"
    _check_scale(*of_blocks, shapes, scheme.scale_dtypes, require)
    for each in whole:
        _check_scale(*each, [(1,), ()], ("F32",), "the scale of a whole matrix has [1]")
    return QuantizedPlace(
        *(place.file, place.dtype, place.shape, place.offset, place.num_bytes),
        *(name, scheme, block, replace(of_blocks[1], shape=grid)),
        whole=replace(whole[0][1], shape=(1,)) if whole else None,
    )


def _check_scale(
    name: str, place: TensorPlace, shapes: Sequence[Shape], dtypes: Sequence[str], require: str
) -> None:
    if place.shape not in shapes:
        raise ValueError(f"{name} in {place.file.name} has shape {list(place.shape)}; {require}")
    if place.dtype not in dtypes:
        raise ValueError(
            f"{name} in {place.file.name} has dtype {place.dtype}, supported: {list(dtypes)}"
        )


@dataclass(frozen=True, slots=True)
class Mxfp4Place(TensorPlace):
    """Where the blocks and scales of a stack in MXFP4 are stored.

    `shape` is the stack's shape, `dtype` the dtype of the dequantised numbers.
    """

    scale_name: str
    scale: TensorPlace

    def stored_shape(self) -> Shape:
        """Shape of the numbers as stored: inputs last."""
        experts, inputs, *outputs = self.shape
        return (experts, *outputs, inputs)

    def stored_box(self, box: Box) -> Box:
        """Map a box of the stack to `stored_shape`."""
        (expert, first, *start), (experts, inputs, *size) = box.start, box.size
        return Box((expert, *start, first), (experts, *size, inputs))

    def as_blocks(self) -> TensorPlace:
        """View the bytes as they are stored, [..., blocks, 16]."""
        *outer, inputs = self.stored_shape()
        return replace(self, shape=(*outer, inputs // MXFP4_BLOCK, MXFP4_BLOCK // 2))

    def as_scales(self) -> TensorPlace:
        """View the scales of the blocks, [..., blocks]."""
        *outer, inputs = self.stored_shape()
        return replace(self.scale, shape=(*outer, inputs // MXFP4_BLOCK))


def with_blocks(
    places: Mapping[str, TensorPlace], scheme: Mxfp4Scheme
) -> tuple[dict[str, TensorPlace], list[str]]:
    """Join blocks and scales of MXFP4 to `Mxfp4Place`; also return their faults."""
    found, faults = dict(places), []
    for blocks_name, blocks in places.items():
        if not blocks_name.endswith(MXFP4_BLOCKS):
            continue
        name = blocks_name.removesuffix(MXFP4_BLOCKS)
        del found[blocks_name]
        scale_name = name + MXFP4_SCALES
        scale = found.pop(scale_name, None)
        if scale is None:
            faults.append(f"{scale_name} of {blocks_name} in {blocks.file.name} is missing")
            continue
        size = (*scale.shape, MXFP4_BLOCK // 2)
        wanted = {"blocks": (blocks, size), "scales": (scale, scale.shape)}
        wrong = [
            f"{name}_{kind} in {place.file.name} is {place.dtype} {list(place.shape)}; it must be "
            f"{_BYTES} {list(shape)}"
            for kind, (place, shape) in wanted.items()
            if place.dtype != _BYTES or place.shape != shape or len(scale.shape) != 3
        ]
        faults += wrong
        if not wrong:
            experts, outputs, num_blocks = scale.shape
            found[name] = Mxfp4Place(
                *(blocks.file, scheme.read_as, (experts, num_blocks * MXFP4_BLOCK, outputs)),
                *(blocks.offset, blocks.num_bytes),
                scale_name=scale_name,
                scale=scale,
            )
    return found, faults
