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
than a factor of its own for every word.
"""

import torch
from torch import Tensor

from parallel.layout import Box, Shape

WORD_BYTES = 8
CPU_BLOCK_BYTES = 1 << 20
"""Read twice, for rows and for columns: the second time from the cache of the core."""
GPU_BLOCK_BYTES = 1 << 28
"""Bounds the copy of values that are not laid out row by row."""


def checksum(values: Tensor, box: Box, shape: Shape) -> Tensor:
    """What `values`, `box` of a tensor of `shape`, add to the tensor's checksum.

    Returns an int64 scalar on the device of `values`, to be added up with those of other boxes;
    int64 overflows as it should.
    """
    assert tuple(values.shape) == box.size and values.element_size() in (1, 2, 4, 8)
    per_word = WORD_BYTES // values.element_size()
    first, last = box.start[-1], box.start[-1] + box.size[-1]
    # A word that the box has a part of: the rest are zeros here, and other boxes add theirs.
    padding = (first % per_word, -last % per_word)
    columns = torch.arange(first // per_word, -(-last // per_word), device=values.device)
    rows = values.detach().reshape(-1, box.size[-1])
    num_bytes = max(1, rows.shape[1] * values.element_size())
    block_bytes = CPU_BLOCK_BYTES if values.device.type == "cpu" else GPU_BLOCK_BYTES
    row_sums = []
    column_sums = torch.zeros(len(columns), dtype=torch.int64, device=values.device)
    for block in rows.split(max(1, block_bytes // num_bytes)):
        if any(padding):
            block = torch.nn.functional.pad(block, padding)
        block = block.contiguous()
        if block.storage_offset() % per_word:  # torch reads words at multiples of 8 bytes only
            block = block.clone()
        words = block.view(torch.int64)
        row_sums.append(words.sum(1))
        column_sums += words.sum(0)
    row_factors = _random(2 * _row_indices(box, shape, values.device)) | 1
    column_factors = _random(2 * columns + 1) & ~1
    return (torch.cat(row_sums) * row_factors).sum() + (column_sums * column_factors).sum()


def whole_checksum(tensor: Tensor) -> Tensor:
    """The checksum of a whole tensor."""
    shape = tuple(tensor.shape)
    return checksum(tensor, Box.whole(shape), shape)


def _row_indices(box: Box, shape: Shape, device: torch.device) -> Tensor:
    """Where the rows of the box are among those of the tensor; in order."""
    indices = torch.zeros(1, dtype=torch.int64, device=device)
    for start, size, extent in zip(box.start[:-1], box.size[:-1], shape[:-1], strict=True):
        along = torch.arange(start, start + size, device=device)
        indices = (indices[:, None] * extent + along).flatten()
    return indices


def _random(indices: Tensor) -> Tensor:
    """Pseudo-random int64 numbers, the same everywhere: the finalizer of SplitMix64.

    With arithmetic shifts in the place of logical ones, which torch has not.
    """
    x = (indices + 1) * -0x61C8864680B583EB
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)
