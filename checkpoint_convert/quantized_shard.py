"""A rank's part of a quantised model: 8-bit weights, and their scales as tensors of their own.

Tensor ranks may each hold a part of a block. Once they have agreed on its maximum, all of them hold
the same scales of a whole weight, as they hold the same norms.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import local

import torch
from torch import Tensor

from checkpoint_convert.formats.torch_dtypes import DTYPES, STORED_DTYPES
from checkpoint_convert.hf_config import read_shape
from checkpoint_convert.quantized_model import QuantizedModel, quantized_model
from checkpoint_convert.quantizer import block_maxima, dequantized, quantized, scales_of
from checkpoint_convert.weights import whole_tensors
from parallel import Box, Layout, Shape, ShardMapping

MAX_ELEMENTS = 1 << 24
"""Of a temporary copy in float32."""
Maxima = dict[str, Tensor]
"""The largest absolute value in each block of a weight, by its name in the weight files."""


def quantized_layout(
    layout: Layout, model: QuantizedModel, tensor_rank: int, expert_tensor_rank: int
) -> Layout:
    """What a rank holds of a quantised model, if `layout` is what it holds of the model.

    Of the ranks that hold the same scales, the first that owns a part of the weight owns them.
    """
    scales: dict[str, ShardMapping] = {}
    for piece in layout.pieces:
        rank = expert_tensor_rank if piece.tensor in model.experts else tensor_rank
        for weight in model.fused.get(piece.tensor, ()):
            name = model.scale_name(weight)
            box = Box.whole(model.scheme.grid(model.matrices[weight]))
            scales[name] = ShardMapping(name, box, name, box, piece.is_replica or rank > 0)
    shapes = {name: piece.box.size for name, piece in scales.items()}
    return Layout({**layout.shapes, **shapes}, (*layout.pieces, *scales.values()), layout.zeros)


class QuantizedShard(Mapping[str, Tensor]):
    """The local tensors of `quantized_layout`, each quantised when it is asked for.

    A thread keeps its last one: what is sent is cut from a weight box by box.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        layout: Layout,
        model: QuantizedModel,
        agree: Callable[[Maxima], None],
    ) -> None:
        """`weights` are the local tensors of `layout`, that of the model before it is quantised.

        `agree` replaces the maxima by those over all ranks that hold parts of the same parameters;
        these have them by the same names in the same order, zeros for what only others hold.
        """
        self._weights, self._model, self._last = weights, model, local()
        self._pieces: dict[str, list[ShardMapping]] = {}
        for piece in layout.pieces:
            if piece.tensor in model.matrices:
                self._pieces.setdefault(piece.local, []).append(piece)
        self._dtype = STORED_DTYPES[model.scheme.dtype]
        maxima = self._maxima()
        agree(maxima)
        self._scales = {
            model.scale_name(name): scales_of(each, self._dtype) for name, each in maxima.items()
        }

    @torch.no_grad()
    def _maxima(self) -> Maxima:
        maxima: Maxima = {}
        for name, pieces in self._pieces.items():
            weight = self._rounded(name)
            for each in self._model.fused[pieces[0].tensor]:
                grid = self._model.scheme.grid(self._model.matrices[each])
                maxima[each] = weight.new_zeros(grid, dtype=torch.float32)
            for piece in pieces:
                block = self._block(piece)
                for part in piece.box.cut(MAX_ELEMENTS):
                    offset = tuple(a % size for a, size in zip(part.start, block, strict=True))
                    first = tuple(a // size for a, size in zip(part.start, block, strict=True))
                    values = weight[piece.local_part(part).slices]
                    found = block_maxima(values, block, offset)
                    here = maxima[piece.tensor][Box(first, tuple(found.shape)).slices]
                    here.copy_(torch.maximum(here, found))
        return maxima

    def _block(self, piece: ShardMapping) -> Shape:
        return self._model.scheme.block_in(self._model.matrices[piece.tensor])

    def _rounded(self, name: str) -> Tensor:
        """A weight in the dtype of the model, in which all others are read."""
        return self._weights[name].detach().to(DTYPES[self._model.scheme.read_as])

    def __getitem__(self, name: str) -> Tensor:
        if name in self._scales:
            return self._scales[name]
        if name not in self._pieces:
            return self._weights[name]
        if getattr(self._last, "name", None) != name:
            self._last.values = self._quantized(name)
            self._last.name = name
        values: Tensor = self._last.values
        return values

    @torch.no_grad()
    def _quantized(self, name: str) -> Tensor:
        weight = self._rounded(name)
        values = torch.empty_like(weight, dtype=self._dtype)
        for here, scales, block, start in self._parts(name):
            values[here] = quantized(weight[here], scales, self._dtype, block, start)
        return values

    def _parts(self, name: str) -> Iterator[tuple[tuple[slice, ...], Tensor, Shape, Shape]]:
        """Of each part of a weight: where it is, its scales, their block, and where it begins."""
        for piece in self._pieces[name]:
            scales = self._scales[self._model.scale_name(piece.tensor)]
            for part in piece.box.cut(MAX_ELEMENTS):
                yield piece.local_part(part).slices, scales, self._block(piece), part.start

    @property
    def quantized(self) -> list[str]:
        """The local names of the weights that are quantised."""
        return list(self._pieces)

    @torch.no_grad()
    def as_read(self, name: str) -> Tensor:
        """A quantised weight as it is read back: its numbers times their scales, rounded."""
        numbers = self[name]
        values = torch.empty_like(numbers, dtype=DTYPES[self._model.scheme.read_as])
        for here, scales, block, start in self._parts(name):
            values[here] = dequantized(numbers[here], scales, block, start)
        return values

    def __iter__(self) -> Iterator[str]:
        yield from self._weights
        yield from self._scales

    def __len__(self) -> int:
        return len(self._weights) + len(self._scales)


def quantized_tensors(folder: Path, quantization: str) -> Iterator[tuple[str, Tensor]]:
    """Name and values of every tensor of the model in a folder, quantised by one of `SCHEMES`.

    One at a time, each before its scales.
    """
    model = quantized_model(quantization, read_shape(folder), "BF16")
    assert model is not None, "the scheme is not none"
    dtype = STORED_DTYPES[model.scheme.dtype]
    for name, values in whole_tensors(folder):
        if name not in model.matrices:
            yield name, values
            continue
        rounded = values.to(DTYPES[model.scheme.read_as])
        block = model.scheme.block_in(model.matrices[name])
        scales = scales_of(block_maxima(rounded, block), dtype)
        yield name, quantized(rounded, scales, dtype, block)
        yield model.scale_name(name), scales
