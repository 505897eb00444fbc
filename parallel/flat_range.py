"""Ranges of a flattened tensor as boxes: the parts that ranks of a distributed optimizer update."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from parallel.layout import Box, Shape


@dataclass(frozen=True, slots=True)
class RangeView:
    """Place of a box of a tensor within a flat range of the tensor."""

    flat: slice
    size: Shape
    """Shape of the elements `flat` of the range: a box that contains the wanted one."""
    inside: tuple[slice, ...]

    def select(self, values: Any) -> Any:
        """View of the box in the `values` of the range."""
        return values.view(-1)[self.flat].view(self.size)[self.inside]


def range_overlaps(
    shape: Shape, start: int, stop: int, boxes: Sequence[Box]
) -> Iterator[tuple[int, Box, RangeView]]:
    """Overlaps of elements `start` to `stop` of a row-major tensor with `boxes`.

    Yields (number of the box, overlap in coordinates of the tensor, its place in the range).
    """
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

    At most two boxes for each dimension but the first, plus one. Elements 3 to 17 of [4, 5] are
    [0, 3:5], [1:3, 0:5] and [3, 0:2].
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
