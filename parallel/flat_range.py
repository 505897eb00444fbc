"""A range of a flattened tensor as boxes of it: the part that a rank of a distributed optimizer
updates."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from parallel.layout import Box, Shape


@dataclass(frozen=True, slots=True)
class RangeView:
    """Where a box of a tensor lies in a flat range of it."""

    flat: slice
    size: Shape
    """Shape of the box that the elements `flat` of the range form."""
    inside: tuple[slice, ...]

    def select(self, values: Any) -> Any:
        """The box, as a view of the `values` of the range."""
        return values.view(-1)[self.flat].view(self.size)[self.inside]


def range_overlaps(
    shape: Shape, start: int, stop: int, boxes: Sequence[Box]
) -> Iterator[tuple[int, Box, RangeView]]:
    """The overlaps of elements `start` to `stop` of a row-major tensor with the `boxes`: for each
    the number of the box, the overlap in the coordinates of the tensor, and where the range has
    it."""
    offset = 0
    for box in boxes_of_range(shape, start, stop):
        flat = slice(offset, offset + box.num_elements)
        offset = flat.stop
        for number, other in enumerate(boxes):
            common = box.overlap(other)
            if common is not None:
                inside = common.moved(box.start, (0,) * len(box.start)).slices
                yield number, common, RangeView(flat, box.size, inside)


def boxes_of_range(shape: Shape, start: int, stop: int) -> list[Box]:
    """Elements `start` to `stop` of a row-major tensor, as boxes in that order.

    At most two boxes for each dimension but the first, plus one.
    """
    if start >= stop:
        return []
    if len(shape) == 1:
        return [Box((start,), (stop - start,))]
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # rows `first` to `last` are whole
    if first > last:  # both ends lie inside one row
        return _in_row(shape, last, start, stop)
    whole = [Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]))]
    return [
        *_in_row(shape, first - 1, start, first * row),
        *(whole if first < last else []),
        *_in_row(shape, last, last * row, stop),
    ]


def _in_row(shape: Shape, index: int, start: int, stop: int) -> list[Box]:
    row = prod(shape[1:])
    return [
        Box((index, *box.start), (1, *box.size))
        for box in boxes_of_range(shape[1:], start - index * row, stop - index * row)
    ]
