"""64-bit checksums of tensors that can be summed box by box, in any order, on any machine.

Computed from the raw bytes, as 64-bit words x[r, c] of the tensor's rows (all dimensions but the
last, flattened), modulo 2^64:

    sum over r, c of (a[r] + b[c]) * x[r, c],    a[r] odd, b[c] even, both fixed random numbers

The factor of a word is odd, so a single changed element is always detected. It depends on row and
column, so exchanged rows, columns or halves, which a plain sum would miss, are detected as well.
Undetected are changes of many words that preserve the sum of every row and of every column, and
one in 2^64 of the others. Zeros add nothing, and a tensor's checksum is the sum of those of the
boxes that make it up: ranks sum what they own, and one all-reduce gives the checksum of the whole.

The sums of words over rows and over columns need no product per word, which is several times faster
than a separate factor for every word. torch computes them on a GPU, checksum_kernel.c on a CPU.
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
"""Maximum size of temporary copies of values that are not contiguous, on a GPU."""

NamedSum = tuple[str, Tensor]
"""Name of a tensor, and the contribution of one of its boxes to its checksum."""


def checksum(values: Tensor, box: Box, shape: Shape) -> Tensor:
    """The contribution of `values`, `box` of a tensor of `shape`, to the tensor's checksum.

    Returns an int64 scalar on the device of `values`, to be added to those of the other boxes;
    int64 overflow gives the sum modulo 2^64.
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
    """Copy `source` to `target`, and return the `checksum` of what `target` then holds.

    On a CPU in one pass, or at least block by block: a second pass over the memory would take as
    long as the copy.
    """
    if target.device.type == "cpu":
        return _sum_on_cpu(BoxCopy("", source, target, box, shape))
    target.copy_(source)
    return checksum_by_torch(target, box, shape)


def added_up(sums: Iterable[NamedSum]) -> dict[str, int]:
    """The checksums of tensors, by name, from those of their boxes; reads the device once."""
    totals: dict[str, Tensor] = {}
    for name, part in sums:
        totals[name] = totals[name] + part if name in totals else part
    return (
        dict(zip(totals, torch.stack([*totals.values()]).tolist(), strict=True)) if totals else {}
    )


def checksum_by_torch(values: Tensor, box: Box, shape: Shape) -> Tensor:
    """`checksum` computed by torch, on any device."""
    values = values.detach()
    assert tuple(values.shape) == box.size and values.element_size() in (1, 2, 4, 8)
    per_word = WORD_BYTES // values.element_size()
    first, last = box.start[-1], box.start[-1] + box.size[-1]
    # Words that lie only partly in the box are filled with zeros; other boxes add their parts.
    padding = (first % per_word, -last % per_word)
    row_factors, column_factors = factors_of(shape, per_word, values.device)
    row_factors = row_factors[box.slices[:-1]].flatten()
    column_factors = column_factors[first // per_word : -(-last // per_word)]
    row_sums, column_sums = [row_factors[:0]], torch.zeros_like(column_factors)
    if values.is_contiguous():  # not a few kernels for every expert
        values = values.view(-1, values.shape[-1])
    row_bytes = values.shape[-1] * values.element_size()
    blocks = (matrix.split(max(1, BLOCK_BYTES // row_bytes)) for matrix in matrices_of(values))
    for block in chain.from_iterable(blocks):
        if any(padding):
            block = torch.nn.functional.pad(block, padding)
        flat = block.contiguous().view(-1)
        if flat.storage_offset() % per_word:  # torch requires words aligned to 8 bytes
            flat = flat.clone()
        words = flat.view(torch.int64).view(len(block), -1)
        row_sums.append(words.sum(1))
        column_sums += words.sum(0)
    return (torch.cat(row_sums) * row_factors).sum() + (column_sums * column_factors).sum()


def _sum_on_cpu(copy: BoxCopy) -> Tensor:
    [(_, total)] = PreparedCopies([copy]).make()
    return total
