"""A range of a flattened tensor as boxes of the tensor. Integers only.

Megatron-Core's distributed optimizer gives each data rank a range of the parameters laid end to
end, wherever that cuts them. As boxes, its states are stored and found like everything else.
"""

from math import prod

from parallel import Box, Shape


def boxes_of_range(shape: Shape, start: int, stop: int) -> list[Box]:
    """Elements `start` to `stop` of a tensor that lies row by row, as boxes, in that order.

    At most two for each dimension but the first, and one more.
    """
    if start >= stop:
        return []
    if len(shape) == 1:
        return [Box((start,), (stop - start,))]
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # rows `first` to `last` are whole
    if first > last:  # both ends are inside of one row
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
