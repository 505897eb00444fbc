"""64-bit checksums of tensors that may be summed up box by box, in any order, on any machine.

Taken over the raw bytes, as 64-bit words x[r, c] of the tensor's rows (all dimensions but the
last, flattened), modulo 2^64:

    sum over r, c of (a[r] + b[c]) * x[r, c],    a[r] odd, b[c] even, both fixed random numbers

The factor of a word is odd, so that one changed element always shows; it depends on row and column,
so that rows, columns or halves that changed places show as well, which a plain sum would not see.
What escapes is a change of many words that leaves the sum of every row and of every column alone,
and otherwise one change in 2^64. Zeros add nothing, and a tensor's checksum is the sum of those of
the boxes that make it up: ranks sum what they own, and one all-reduce tells what the whole is.

The word sums of rows and of columns need no product per word, which makes this several times faster
than a factor of its own for every word. On a GPU torch takes them, on a CPU checksum_kernel.c.
"""

from collections.abc import Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor

from parallel.checksum_factors import WORD_BYTES, factors_of
from parallel.cpu_checksum import BoxCopy, PreparedCopies
from parallel.layout import Box, Shape
from parallel.views import matrices_of

BLOCK_BYTES = 1 << 28
"""Bounds the copy of values that are not laid out row by row, on a GPU."""

NamedSum = tuple[str, Tensor]
"""Name of a tensor, and what a box of it adds to its checksum."""


def checksum(values: Tensor, box: Box, shape: Shape) -> Tensor:
    """What `values`, `box` of a tensor of `shape`, add to the tensor's checksum.

    Returns an int64 scalar on the device of `values`, to be added up with those of other boxes;
    int64 overflows as it should.
    """
    if values.device.type == "cpu":
        return _sum_on_cpu(BoxCopy("", values, values, box, shape))
    return checksum_by_torch(values, box, shape)


def whole_checksum(tensor: Tensor) -> Tensor:
    """The checksum of a whole tensor."""
    shape = tuple(tensor.shape)
    return checksum(tensor, Box.whole(shape), shape)


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The checksums of whole tensors, by name."""
    return added_up((name, whole_checksum(tensor)) for name, tensor in tensors.items())


def copy_and_sum(source: Tensor, target: Tensor, box: Box, shape: Shape) -> Tensor:
    """Copy `source` to `target`, and return the `checksum` of what `target` holds then.

    On a CPU in one pass, or at least block by block: a second pass over the memory takes as long as
    the copy.
    """
    if target.device.type == "cpu":
        return _sum_on_cpu(BoxCopy("", source, target, box, shape))
    target.copy_(source)
    return checksum_by_torch(target, box, shape)


def added_up(sums: Iterable[NamedSum]) -> dict[str, int]:
    """The checksums of tensors, by name, from those of their boxes; the device is read once."""
    totals: dict[str, Tensor] = {}
    for name, part in sums:
        totals[name] = totals[name] + part if name in totals else part
    return (
        dict(zip(totals, torch.stack([*totals.values()]).tolist(), strict=True)) if totals else {}
    )


def checksum_by_torch(values: Tensor, box: Box, shape: Shape) -> Tensor:
    """The `checksum`, on any device."""
    values = values.detach()
    assert tuple(values.shape) == box.size and values.element_size() in (1, 2, 4, 8)
    per_word = WORD_BYTES // values.element_size()
    first, last = box.start[-1], box.start[-1] + box.size[-1]
    # A word that the box has a part of: the rest are zeros here, and other boxes add theirs.
    padding = (first % per_word, -last % per_word)
    row_factors, column_factors = factors_of(shape, per_word, values.device)
    row_factors = row_factors[box.slices[:-1]].flatten()
    column_factors = column_factors[first // per_word : -(-last // per_word)]
    row_sums, column_sums = [row_factors[:0]], torch.zeros_like(column_factors)
    row_bytes = values.shape[-1] * values.element_size()
    blocks = (matrix.split(max(1, BLOCK_BYTES // row_bytes)) for matrix in matrices_of(values))
    for block in chain.from_iterable(blocks):
        if any(padding):
            block = torch.nn.functional.pad(block, padding)
        flat = block.contiguous().view(-1)
        if flat.storage_offset() % per_word:  # torch reads words at multiples of 8 bytes only
            flat = flat.clone()
        words = flat.view(torch.int64).view(len(block), -1)
        row_sums.append(words.sum(1))
        column_sums += words.sum(0)
    return (torch.cat(row_sums) * row_factors).sum() + (column_sums * column_factors).sum()


def _sum_on_cpu(copy: BoxCopy) -> Tensor:
    [(_, total)] = PreparedCopies([copy]).make()
    return total
