"""The vocabulary in which a model family is described, once, for every direction."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallel import Box, Piece, Shape


@dataclass(frozen=True)
class Family:
    """A `model_type` of config.json: a dense decoder, and in what it differs from the others."""

    model_type: str
    defaults: Mapping[str, Any]
    """Values that transformers assumes for keys missing in config.json."""
    required: Mapping[str, Any]
    """Keys that change the numbers, with the one value that is carried over."""
    attention_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True)
class Tensor:
    """A tensor of the weight files."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class Parameter:
    """A parameter of Megatron-Core before it is split over tensor ranks.

    Its rows are dealt like cards: every source is cut into `interleave` equal shares of rows, and
    round i takes the i-th share of each source in turn. One round is plain concatenation; fused
    QKV has one round per query group; gate and up have one round per tensor rank, so that the
    equal cut over ranks gives each rank [gate share; up share]. `zero_rows` follow at the end.
    """

    name: str
    sources: tuple[Tensor, ...]
    split: int | None = None
    """Dimension cut into equal parts over tensor ranks; None when every rank holds the whole."""
    interleave: int = 1
    zero_rows: int = 0
    is_copy: bool = False
    """Whether another parameter holds the same elements and owns them."""

    @property
    def shape(self) -> Shape:
        """Shape before the split, with the zero rows."""
        rows = sum(source.shape[0] for source in self.sources) + self.zero_rows
        return (rows, *self.sources[0].shape[1:])


@dataclass(frozen=True)
class Shard:
    """One tensor rank's part of a parameter; pieces are named as in the `Parameter`."""

    shape: Shape
    pieces: tuple[Piece, ...]
    zeros: tuple[Box, ...]


def shard(parameter: Parameter, rank: int, size: int) -> Shard:
    """Cut out the part of tensor rank `rank` of `size`."""
    local = Box.whole(parameter.shape)
    if parameter.split is not None:
        extent, rest = divmod(parameter.shape[parameter.split], size)
        assert rest == 0, f"{parameter.name}: {parameter.shape} over {size} tensor ranks"
        local = _narrow(local, parameter.split, rank * extent, extent)
    is_replica = parameter.is_copy or (parameter.split is None and rank > 0)
    pieces, zeros = [], []
    for block, tensor, first_row in _blocks(parameter, local):
        box = block.overlap(local)
        if box is None:
            continue
        local_box = box.moved(local.start, (0,) * len(local.start))
        if tensor is None:
            zeros.append(local_box)
        else:
            source_box = box.moved(block.start, (first_row, *block.start[1:]))
            pieces.append(Piece(parameter.name, local_box, tensor, source_box, is_replica))
    return Shard(local.size, tuple(pieces), tuple(zeros))


def _blocks(parameter: Parameter, local: Box) -> list[tuple[Box, str | None, int]]:
    """Blocks of rows of the rounds that `local` meets: place, source (None: zeros), first row."""
    whole = Box.whole(parameter.shape)
    shares = [source.shape[0] // parameter.interleave for source in parameter.sources]
    round_rows = sum(shares)
    first = local.start[0] // round_rows
    last = min(-(-local.end[0] // round_rows), parameter.interleave)
    blocks: list[tuple[Box, str | None, int]] = []
    for i in range(first, last):
        row = i * round_rows
        for source, share in zip(parameter.sources, shares, strict=True):
            blocks.append((_narrow(whole, 0, row, share), source.name, i * share))
            row += share
    if parameter.zero_rows:
        end = round_rows * parameter.interleave
        blocks.append((_narrow(whole, 0, end, parameter.zero_rows), None, 0))
    return blocks


def _narrow(box: Box, dim: int, start: int, size: int) -> Box:
    starts, sizes = list(box.start), list(box.size)
    starts[dim], sizes[dim] = start, size
    return Box(tuple(starts), tuple(sizes))
