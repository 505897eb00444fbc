"""Splits a range of a flattened tensor into boxes of the tensor. Integers only.

Megatron-Core's distributed optimizer gives each data rank a range of the concatenated parameters,
regardless of where it cuts them. As boxes, its states are stored and found like everything else.
"""

from math import prod

from parallel import Box, Shape


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
