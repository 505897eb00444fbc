"""A rank's part of a quantised model: weights of 8 or 4 bits, and their scales as tensors.

Several tensor ranks may hold parts of one block. They agree on its maximum, and then all hold the
scales of the whole weight. In NVFP4 no rank holds a part of a block; ranks agree on the scale of
the whole matrix instead.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import local
from typing import NamedTuple

import torch
from torch import Tensor

from checkpoint_convert.formats.torch_dtypes import DTYPES, STORED_DTYPES
from checkpoint_convert.hf_config import read_shape
from checkpoint_convert.quantized.model import QuantizedModel, over, quantized_model
from checkpoint_convert.quantized.numbers import (
    block_maxima,
    dequantized,
    packed,
    quantized,
    relative_scales,
    scales_of,
    whole_scale,
)
from checkpoint_convert.weights import whole_tensors
from parallel import Box, Layout, Shape, ShardMapping

MAX_ELEMENTS = 1 << 24
"""Elements of a temporary copy in float32."""
Maxima = dict[str, Tensor]
"""Largest absolute value in each block of agreed scales, by the weight's name in the files."""


class _Part(NamedTuple):
    here: Box
    """Its box in the local weight."""
    scales: Tensor
    """Scales by which its numbers are multiplied."""
    block: Shape
    start: Shape
    """Its first row and column, counted from the first block of `scales`."""
    own: Tensor | None
    """Stored scales of its blocks in NVFP4; None: all ranks hold the weight's agreed scales."""


class QuantizedShard(Mapping[str, Tensor]):
    """The local tensors of `quantized_layout`, each quantised on access.

    Each thread keeps its last weight, as a push cuts its parts from one weight box by box.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        layout: Layout,
        model: QuantizedModel,
        agree: Callable[[Maxima], None],
    ) -> None:
        """`weights` are the local tensors of `layout`, the layout before quantisation.

        `agree` replaces each maximum by the largest over all ranks with parts of the same
        parameters. These ranks all call it with the same names in the same order, and zeros for
        weights of other ranks.
        """
        self._weights, self._model, self._last = weights, model, local()
        self._pieces: dict[str, list[ShardMapping]] = {}
        for piece in layout.pieces:
            if piece.tensor in model.matrices:
                self._pieces.setdefault(piece.local, []).append(piece)
        self._dtype = STORED_DTYPES[model.scheme.dtype]
        self._weight_of = {
            name + suffix: name for name in self._pieces for suffix in model.scheme.cut
        }
        maxima = self._maxima()
        agree(maxima)
        self._scales = {model.scale_name(name): self._agreed(name, maxima) for name in maxima}

    @torch.no_grad()
    def _maxima(self) -> Maxima:
        maxima: Maxima = {}
        for name, pieces in self._pieces.items():
            weight = self._rounded(name)
            # Zeros for fused weights of which this rank holds nothing: see `agree`.
            for each in self._model.fused[pieces[0].tensor]:
                grid = self._model.agreed_shape(each)
                maxima.setdefault(each, weight.new_zeros(grid, dtype=torch.float32))
            for piece in pieces:
                block = self._model.agreed_block(piece.tensor)
                for part in piece.box.cut(MAX_ELEMENTS):
                    # Where the part begins: in its first block, and in the grid of blocks.
                    offset = tuple(a % size for a, size in zip(part.start, block, strict=True))
                    first = tuple(a // size for a, size in zip(part.start, block, strict=True))
                    values = weight[piece.local_part(part).slices]
                    found = block_maxima(values, block, offset)
                    whole = maxima[piece.tensor].view(-1, maxima[piece.tensor].shape[-1])
                    here = whole[Box(first, tuple(found.shape)).slices]
                    here.copy_(torch.maximum(here, found))
        return maxima

    def _agreed(self, name: str, maxima: Maxima) -> Tensor:
        if not self._model.scheme.whole:
            return scales_of(maxima[name], self._dtype)
        # Engines have one scale for all parts of a fused matrix.
        return whole_scale(torch.cat([maxima[each] for each in self._model.fused[name]]).amax())

    def _rounded(self, name: str) -> Tensor:
        """A local weight, rounded to the dtype of the model's other tensors before quantisation."""
        return self._weights[name].detach().to(DTYPES[self._model.scheme.read_as])

    def __getitem__(self, name: str) -> Tensor:
        if name in self._scales:
            return self._scales[name]
        if name not in self._weight_of:
            return self._weights[name]
        weight = self._weight_of[name]
        if getattr(self._last, "name", None) != weight:
            self._last.stored = self._stored(weight)
            self._last.name = weight
        values: Tensor = self._last.stored[name]
        return values

    @torch.no_grad()
    def _stored(self, name: str) -> dict[str, Tensor]:
        """Tensors stored in place of a weight, without agreed scales."""
        weight, scheme = self._rounded(name), self._model.scheme
        numbers, stored = torch.empty_like(weight, dtype=self._dtype), {}
        if scheme.whole:
            grid = scheme.grid(tuple(weight.shape))
            stored[name + scheme.suffix] = weight.new_empty(grid, dtype=torch.float8_e4m3fn)
        for part in self._parts(name, weight):
            values = weight[part.here.slices]
            numbers[part.here.slices] = quantized(
                values, part.scales, self._dtype, part.block, part.start
            )
            if part.own is not None:
                stored[name + scheme.suffix][over(part.here, part.block).slices] = part.own
        return {**stored, name + scheme.numbers: packed(numbers)}

    def _parts(self, name: str, weight: Tensor) -> Iterator[_Part]:
        for piece in self._pieces[name]:
            scales = self._scales[self._model.scale_name(piece.tensor)]
            block = self._model.scheme.block_in(self._model.matrices[piece.tensor])
            for part in piece.box.cut(MAX_ELEMENTS):
                here = piece.local_part(part)
                if not self._model.scheme.whole:
                    yield _Part(here, scales, block, part.start, None)
                    continue
                own = relative_scales(block_maxima(weight[here.slices], block), scales)
                # With the rounded scales of blocks, by which readers multiply.
                yield _Part(here, own.float() / scales, block, (0, 0), own)

    @property
    def quantized(self) -> list[str]:
        """Local names of the quantised weights."""
        return list(self._pieces)

    @torch.no_grad()
    def as_read(self, name: str) -> Tensor:
        """A weight as it is read back: its quantised numbers times their scales, rounded."""
        weight = self._rounded(name)
        values = torch.empty_like(weight)
        for here, scales, block, start, _ in self._parts(name, weight):
            numbers = quantized(weight[here.slices], scales, self._dtype, block, start)
            values[here.slices] = dequantized(numbers, scales, block, start)
        return values

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._weights if name not in self._pieces)
        yield from self._weight_of
        yield from self._scales

    def __len__(self) -> int:
        return sum(1 for _ in self)


def quantized_tensors(
    folder: Path, quantization: str, ignore: Sequence[str] = (), *, of_mtp: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Name and values of every tensor of `whole_tensors`, quantised by an `ENGINE_SCHEMES`.

    One at a time, a weight before its scales. `ignore` is as in `quantized_model`.
    """
    shape = read_shape(folder)
    # `ignore` may name modules of the layer that drafts.
    shape = replace(shape, trains_mtp=shape.can_train_mtp)
    model = quantized_model(quantization, shape, "BF16", ignore)
    assert model is not None, "the scheme is not none"
    dtype = STORED_DTYPES[model.scheme.dtype]
    for name, values in whole_tensors(folder, of_mtp=of_mtp):
        if name not in model.matrices:
            yield name, values
            continue
        rounded = values.to(DTYPES[model.scheme.read_as])
        block = model.scheme.block_in(model.matrices[name])
        scales = scales_of(block_maxima(rounded, block), dtype)
        yield name, quantized(rounded, scales, dtype, block)
        yield model.scale_name(name), scales
