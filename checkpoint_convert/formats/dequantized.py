"""Reads boxes of quantised matrices as the numbers that they stand for."""

from collections.abc import Mapping

import torch
from torch import Tensor

from checkpoint_convert.formats.safetensors_file import TensorPlace
from checkpoint_convert.formats.tensor_io import StoredTensors, read_box
from checkpoint_convert.formats.torch_dtypes import DTYPES
from checkpoint_convert.quantization import QuantizedPlace
from parallel import Box, Shape

_STORED = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
# Products are made of so many elements at a time: 4 MiB in float32.
_MAX_ELEMENTS = 1 << 20


class DequantizedTensors(StoredTensors):
    """The tensors of some files; of quantised ones, ``weight * scale``.

    A product is computed in float32 and rounded once, as by transformers and compressed-tensors. A
    box may begin and end inside a block: its bytes are read, and the scales of its blocks.
    """

    def __init__(self, places: Mapping[str, TensorPlace]) -> None:
        super().__init__(places)
        self._quantized = {n: p for n, p in places.items() if isinstance(p, QuantizedPlace)}
        read_as = {name: place.read_as for name, place in self._quantized.items()}
        self.dtypes = {**self.dtypes, **read_as}

    def read_into(self, name: str, box: Box, target: Tensor) -> None:
        """See `TensorSource`; raises ValueError for a scale that is no finite number above 0."""
        place = self._quantized.get(name)
        if place is None:
            super().read_into(name, box, target)
            return
        for part in box.cut(_MAX_ELEMENTS):
            values = torch.empty(part.size, dtype=_STORED[place.dtype])
            read_box(self._descriptor(place.file), place, part, values)
            first, scales = self._scales(place, part)
            product = dequantized(values, scales, place.block, part.moved(first, (0, 0)).start)
            target[part.moved(box.start, (0, 0)).slices] = product

    def _scales(self, place: QuantizedPlace, box: Box) -> tuple[Shape, Tensor]:
        """Where the first block of `box` begins in the matrix, and the scales of its blocks."""
        first = tuple(a // size for a, size in zip(box.start, place.block, strict=True))
        last = tuple((b - 1) // size for b, size in zip(box.end, place.block, strict=True))
        blocks = Box(first, tuple(b - a + 1 for a, b in zip(first, last, strict=True)))
        scales = torch.empty(blocks.size, dtype=DTYPES[place.scale.dtype])
        read_box(self._descriptor(place.scale.file), place.scale, blocks, scales)
        good = scales.isfinite() & (scales > 0)
        if not good.all():
            raise ValueError(
                f"{place.scale.file}: {place.scale_name} has a scale of {scales[~good][0]:g}; it "
                "must be a finite number above 0"
            )
        begin = tuple(a * size for a, size in zip(first, place.block, strict=True))
        return begin, scales.float()


def dequantized(values: Tensor, scales: Tensor, block: Shape, offset: Shape) -> Tensor:
    """Each of `values` [r, c] times the scale of its block, in float32.

    `offset` is where the values begin in the first block: with rows of 128 per block and an offset
    of 100, the first 28 rows have the scales of row 0, the next 128 those of row 1.
    """
    for dim in range(2):
        if scales.shape[dim] > 1:  # a single one is broadcast
            index = torch.arange(offset[dim], offset[dim] + values.shape[dim]) // block[dim]
            scales = scales.index_select(dim, index)
    return values.float().mul_(scales)
