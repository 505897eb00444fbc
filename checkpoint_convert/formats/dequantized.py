"""Reads boxes of quantised matrices as the numbers that they stand for."""

from collections.abc import Mapping

import torch
from torch import Tensor

from checkpoint_convert.formats.safetensors_file import TensorPlace
from checkpoint_convert.formats.tensor_io import StoredTensors, read_box
from checkpoint_convert.formats.torch_dtypes import DTYPES, STORED_DTYPES
from checkpoint_convert.mxfp4 import BLOCK, Mxfp4Place
from checkpoint_convert.quantization import Scheme
from checkpoint_convert.quantized_place import QuantizedPlace
from checkpoint_convert.quantizer import dequantized, dequantized_mxfp4, quantized, unpacked
from parallel import Box, Shape

# Products are made of so many elements at a time: 4 MiB in float32.
_MAX_ELEMENTS = 1 << 20
_MOST_ROUNDED = 1.5
"""By how much a scale may be too small since it was rounded: the smallest of FP8."""


class DequantizedTensors(StoredTensors):
    """The tensors of some files; of quantised ones, ``weight * scale``, of MXFP4 the same.

    A product is computed in float32 and rounded once, as by transformers and compressed-tensors. A
    box may begin and end inside a block: its bytes are read, and the scales of its blocks.
    """

    def __init__(self, places: Mapping[str, TensorPlace]) -> None:
        super().__init__(places)
        self._quantized = {n: p for n, p in places.items() if isinstance(p, QuantizedPlace)}
        self._blocks = {n: p for n, p in places.items() if isinstance(p, Mxfp4Place)}
        read_as = {name: place.scheme.read_as for name, place in self._quantized.items()}
        self.dtypes = {**self.dtypes, **read_as}

    def read_into(self, name: str, box: Box, target: Tensor) -> None:
        """See `TensorSource`; raises ValueError for a scale or a value that cannot be."""
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
            first, end = part.start[-1] // BLOCK, -(-part.end[-1] // BLOCK)
            within = Box((*part.start[:-1], first), (*part.size[:-1], end - first))
            blocks = torch.empty((*within.size, BLOCK // 2), dtype=torch.uint8)
            whole = Box((*within.start, 0), tuple(blocks.shape))
            read_box(self._descriptor(place.file), place.as_blocks(), whole, blocks)
            scales = torch.empty(within.size, dtype=torch.uint8)
            read_box(self._descriptor(place.scale.file), place.as_scales(), within, scales)
            if (scales == 255).any():
                raise ValueError(f"{place.scale.file}: {place.scale_name} has a scale of NaN")
            values = dequantized_mxfp4(blocks, scales, DTYPES[place.dtype])
            begin = part.start[-1] - first * BLOCK
            values = values[..., begin : begin + part.size[-1]]
            transposed[part.moved(stored.start, (0,) * len(part.start)).slices] = values

    def is_quantized(self, name: str) -> bool:
        """Whether the tensor is stored as numbers with scales."""
        return name in self._quantized

    def scheme(self, name: str) -> Scheme:
        return self._quantized[name].scheme

    def as_stored(self, name: str, box: Box, values: Tensor) -> Tensor:
        """Round `values` as if they were stored in `box` of a quantised matrix.

        Those that are too large for the scales of their blocks stay as they are.
        """
        place = self._quantized[name]
        begin, scales = self._scales(place, box)
        offset = box.moved(begin, (0, 0)).start

        def read(values: Tensor) -> Tensor:
            numbers = quantized(values, scales, STORED_DTYPES[place.dtype], place.block, offset)
            return dequantized(numbers, scales, place.block, offset)

        largest = read(torch.full_like(values, torch.inf))
        fits = values.abs() <= _MOST_ROUNDED * largest
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
        """A box of scales in float32; in FP8, those of small blocks are rounded to zero."""
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
