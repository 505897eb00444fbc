"""Numbers of 8 or 4 bits with a scale for each block: rounded from values, and read back.

A number q stands for q times the scale of its block; there are no offsets, so zero stands for zero.
The largest absolute value of a block stands for the largest number, as in compressed-tensors and,
for FP8, in DeepSeek's files and ModelOpt's. Numbers of 4 bits (E2M1) have dtype uint8, each in a
byte of its own until they are `packed`; their scales are relative to a scale of the whole matrix
(NVFP4). All functions are pure; `DequantizedTensors` reads files.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from checkpoint_convert.formats.safetensors_file import TensorPlace
from checkpoint_convert.formats.tensor_io import StoredTensors, read_box
from checkpoint_convert.formats.torch_dtypes import DTYPES, STORED_DTYPES
from checkpoint_convert.quantized.places import Mxfp4Place, QuantizedPlace
from checkpoint_convert.quantized.scheme import MXFP4_BLOCK, Scheme
from parallel import Box, Shape

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.5, torch.uint8: 6.0}
"""Number for a block's largest value before rounding: half the range of the dtype."""
_RANGES = {torch.float8_e4m3fn: (-448.0, 448.0), torch.int8: (-128.0, 127.0)}
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three bits of a number of 4 bits (E2M1); the fourth is its sign."""
# Midpoints between these values. Ties go to the even code: down at the first four, else up.
_TIES_DOWN, _TIES_UP = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)
# Elements to multiply at a time: 4 MiB in float32.
_MAX_ELEMENTS = 1 << 20
_SCALE_ERROR = 1.5
"""Largest factor by which rounding to FP8 makes a scale too small: at FP8's smallest numbers."""


def block_maxima(values: Tensor, block: Shape, offset: Shape = (0, 0)) -> Tensor:
    """Largest absolute value in each block of a matrix, over `values` [r, c], a part of it.

    `offset` is where the values begin in the first block. For a block that several parts share, the
    caller takes the maximum of their maxima.
    """
    maxima = values.abs()
    for dim in range(2):
        begin, size, end = offset[dim], block[dim], offset[dim] + values.shape[dim]
        count = -(-end // size)
        if count == 1:
            maxima = maxima.amax(dim, keepdim=True)
        elif size > 1:
            margins = (begin, count * size - end)
            padded = pad(maxima, margins if dim == 1 else (0, 0, *margins))
            maxima = padded.unflatten(dim, (count, size)).amax(dim + 1)
    return maxima


def scales_of(maxima: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 scales of blocks with these maxima, for numbers of `dtype`.

    A block of zeros has scale eps, as values are divided by scales.
    """
    scales = _over(maxima, _LARGEST[dtype])
    return torch.where(scales == 0, torch.finfo(torch.float32).eps, scales)


def _over(values: Tensor, divisor: float) -> Tensor:
    """Quotients with the same bits on any device."""
    # By a Python number, CUDA would multiply by its rounded reciprocal.
    return values.float() / torch.tensor(divisor, device=values.device)


def whole_scale(maximum: Tensor) -> Tensor:
    """Float32 scale [1] of a matrix with this maximum: 448 * 6 / maximum.

    With it, the largest scale of a block is the largest number of FP8.
    """
    scale = _LARGEST[torch.float8_e4m3fn] * _LARGEST[torch.uint8] / maximum.float().reshape(1)
    return torch.where(scale.isinf(), 1.0, scale)  # a matrix of zeros, or nearly


def relative_scales(maxima: Tensor, whole: Tensor) -> Tensor:
    """FP8 scales of 4-bit blocks with these maxima, relative to the scale of the matrix.

    Scales that would be zero are 0.125, as in compressed-tensors.
    """
    # Clamped, as float8_e4m3fn has no infinity: larger values would be NaN.
    limited = (whole * _over(maxima, _LARGEST[torch.uint8])).clamp_(max=448.0)
    rounded = limited.to(torch.float8_e4m3fn).float()
    return torch.where(rounded == 0, 0.125, rounded).to(torch.float8_e4m3fn)


def quantized(
    values: Tensor, scales: Tensor, dtype: torch.dtype, block: Shape, offset: Shape = (0, 0)
) -> Tensor:
    """Each of `values` [r, c] divided by the scale of its block, in float32, rounded to `dtype`.

    `scales` are of the blocks that the values reach into; `offset` is as in `dequantized`.
    """
    numbers, divisors = _paired(values.float(), scales, block, offset)
    divided = (numbers / divisors).view(values.shape)
    if dtype == torch.uint8:
        return _to_fp4(divided)
    # Before rounding: a block's largest value is 127.5 in INT8, and FP8 has no infinity, but NaN.
    limited = divided.clamp_(*_RANGES[dtype])
    return (limited.round_() if dtype == torch.int8 else limited).to(dtype)


def _to_fp4(values: Tensor) -> Tensor:
    # The code of a value is the number of midpoints below it, an index into `FP4`.
    sizes, code = values.abs(), (values < 0).to(torch.uint8) << 3
    for bound in _TIES_DOWN:
        code += sizes > bound
    for bound in _TIES_UP:
        code += sizes >= bound
    return code


def dequantized(values: Tensor, scales: Tensor, block: Shape, offset: Shape) -> Tensor:
    """Each of `values` [r, c] times the scale of its block, in float32.

    `offset` is where the values begin in the first block: with rows of 128 per block and an offset
    of 100, the first 28 rows have the scales of row 0, the next 128 those of row 1.
    """
    numbers = _from_fp4(values) if values.dtype == torch.uint8 else values.float()
    # `products` is a view: multiplying it in place changes `numbers`.
    products, factors = _paired(numbers, scales, block, offset)
    products.mul_(factors)
    return numbers


def _from_fp4(values: Tensor) -> Tensor:
    table = torch.tensor([*FP4, *(-each for each in FP4)], device=values.device)
    return table[values.int()]


def packed(numbers: Tensor) -> Tensor:
    """Numbers [..., n] as stored: 4-bit ones in pairs, the first in the lower half of a byte."""
    if numbers.dtype != torch.uint8:
        return numbers
    return numbers[..., ::2] | numbers[..., 1::2] << 4


def unpacked(stored: Tensor) -> Tensor:
    """Inverse of `packed`."""
    if stored.dtype != torch.uint8:
        return stored
    return torch.stack([stored & 0x0F, stored >> 4], dim=-1).flatten(-2)


def dequantized_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers [..., n * 32] of `packed` blocks [..., n, 16] with scales [..., n], both bytes.

    A scale s stands for 2 ** (s - 127).
    """
    exponents = scales.int()[..., None] - 127
    return torch.ldexp(_from_fp4(unpacked(blocks)), exponents).flatten(-2).to(dtype)


def _paired(values: Tensor, scales: Tensor, block: Shape, offset: Shape) -> tuple[Tensor, Tensor]:
    """A view of values [r, c], and scales that broadcast to it."""
    rows, columns = values.shape
    if block[0] == 1 and scales.shape == (rows, columns / block[1]):  # `/`: no partial block
        return values.unflatten(1, (-1, block[1])), scales[..., None]
    for dim in range(2):
        if scales.shape[dim] > 1:  # a single one is broadcast
            first = offset[dim]
            elements = torch.arange(first, first + values.shape[dim], device=scales.device)
            scales = scales.index_select(dim, elements // block[dim])
    return values, scales


class DequantizedTensors(StoredTensors):
    """Tensors of files; quantised ones, MXFP4 included, are read as ``weight * scale``.

    A product is computed in float32 and rounded once, as by transformers and compressed-tensors. A
    box may begin and end inside a block: only its bytes are read, and the scales of its blocks.
    """

    def __init__(self, places: Mapping[str, TensorPlace]) -> None:
        super().__init__(places)
        self._quantized = {n: p for n, p in places.items() if isinstance(p, QuantizedPlace)}
        self._blocks = {n: p for n, p in places.items() if isinstance(p, Mxfp4Place)}
        read_as = {name: place.scheme.read_as for name, place in self._quantized.items()}
        self.dtypes = {**self.dtypes, **read_as}

    def read_into(self, name: str, box: Box, target: Tensor) -> None:
        """See `TensorSource`; raises ValueError for an invalid scale or a non-finite value."""
        if name in self._blocks:
            self._read_blocks(self._blocks[name], box, target)
            self.check_finite(name, self._blocks[name], target)
            return
        place = self._quantized.get(name)
        if place is None:
            super().read_into(name, box, target)
            return
        for part in box.cut(_MAX_ELEMENTS):
            values = self._read_numbers(place, part)
            first, scales = self._scales(place, part)
            product = dequantized(values, scales, place.block, part.moved(first, (0, 0)).start)
            target[part.moved(box.start, (0, 0)).slices] = product
        self.check_finite(name, place, target)

    def _read_numbers(self, place: QuantizedPlace, box: Box) -> Tensor:
        """The numbers of a box, which may begin or end inside a byte."""
        inside = place.stored_box(box)
        stored = torch.empty(inside.size, dtype=STORED_DTYPES[place.dtype])
        read_box(self._descriptor(place.file), place.numbers, inside, stored)
        begin = box.start[1] - inside.start[1] * place.scheme.per_byte
        return unpacked(stored)[:, begin : begin + box.size[1]]

    def _read_blocks(self, place: Mxfp4Place, box: Box, target: Tensor) -> None:
        """Read `box` of a stack of matrices that are stored in MXFP4, transposed."""
        stored, transposed = place.stored_box(box), target.movedim(1, -1)
        for part in stored.cut(_MAX_ELEMENTS):
            first, end = part.start[-1] // MXFP4_BLOCK, -(-part.end[-1] // MXFP4_BLOCK)
            within = Box((*part.start[:-1], first), (*part.size[:-1], end - first))
            blocks = torch.empty((*within.size, MXFP4_BLOCK // 2), dtype=torch.uint8)
            whole = Box((*within.start, 0), tuple(blocks.shape))
            read_box(self._descriptor(place.file), place.as_blocks(), whole, blocks)
            scales = torch.empty(within.size, dtype=torch.uint8)
            read_box(self._descriptor(place.scale.file), place.as_scales(), within, scales)
            # Scales of MXFP4 are E8M0, in which 255 is NaN.
            if (scales == 255).any():
                raise ValueError(f"{place.scale.file}: {place.scale_name} has a scale of NaN")
            values = dequantized_mxfp4(blocks, scales, DTYPES[place.dtype])
            begin = part.start[-1] - first * MXFP4_BLOCK
            values = values[..., begin : begin + part.size[-1]]
            transposed[part.moved(stored.start, (0,) * len(part.start)).slices] = values

    def is_quantized(self, name: str) -> bool:
        """Whether the tensor is stored as numbers with scales."""
        return name in self._quantized

    def scheme(self, name: str) -> Scheme:
        return self._quantized[name].scheme

    def as_stored(self, name: str, box: Box, values: Tensor) -> Tensor:
        """Round `values` as if they were stored in `box` of a quantised matrix.

        Values that are too large for the scale of their block stay as they are.
        """
        place = self._quantized[name]
        begin, scales = self._scales(place, box)
        offset = box.moved(begin, (0, 0)).start

        def read(values: Tensor) -> Tensor:
            numbers = quantized(values, scales, STORED_DTYPES[place.dtype], place.block, offset)
            return dequantized(numbers, scales, place.block, offset)

        # Infinity is clamped to the largest number of the block.
        largest = read(torch.full_like(values, torch.inf))
        fits = values.abs() <= _SCALE_ERROR * largest
        return torch.where(fits, read(values), values).to(DTYPES[place.scheme.read_as])

    def _scales(self, place: QuantizedPlace, box: Box) -> tuple[Shape, Tensor]:
        """Where the first block of `box` begins in the matrix, and the scales of its blocks."""
        blocks, names = place.blocks_of(box), place.scheme.scale_names(place.name)
        scales = self._read_scales(place.scale, names[0], blocks, bool(place.scheme.whole))
        if place.whole is not None:
            whole = self._read_scales(place.whole, names[1], Box((0,), (1,)), False)
            scales = scales / whole if place.scheme.divides else scales * whole
            if not scales.isfinite().all():
                raise ValueError(
                    f"{place.file}: {names[0]} and {names[1]} make a scale that is not finite"
                )
        return place.elements_of(blocks).start, scales

    def _read_scales(self, place: TensorPlace, name: str, box: Box, may_be_zero: bool) -> Tensor:
        """A box of scales in float32; FP8 scales of small blocks may have been rounded to zero."""
        stored = torch.empty(box.size, dtype=STORED_DTYPES[place.dtype])
        read_box(self._descriptor(place.file), place, box, stored)
        scales = stored.float()
        good = scales.isfinite() & (scales >= 0 if may_be_zero else scales > 0)
        if not good.all():
            least = "from 0" if may_be_zero else "above 0"
            raise ValueError(
                f"{place.file}: {name} has a scale of {scales[~good][0]:g}; it must be a finite "
                f"number {least}"
            )
        return scales
