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

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from math import prod

import torch
from torch import Tensor

from parallel.layout import Box, Shape

WORD_BYTES = 8
CPU_BLOCK_BYTES = 1 << 19
"""Read twice, for rows and for columns, and written before that: all in the cache of the core."""
GPU_BLOCK_BYTES = 1 << 28
"""Bounds the copy of values that are not laid out row by row."""


NamedSum = tuple[str, Tensor]
"""Name of a tensor, and what a box of it adds to its checksum."""


def checksum(values: Tensor, box: Box, shape: Shape) -> Tensor:
    """What `values`, `box` of a tensor of `shape`, add to the tensor's checksum.

    Returns an int64 scalar on the device of `values`, to be added up with those of other boxes;
    int64 overflows as it should.
    """
    return _sum_of(_blocks_of(values.detach()), values, box, shape)


def whole_checksum(tensor: Tensor) -> Tensor:
    """The checksum of a whole tensor."""
    shape = tuple(tensor.shape)
    return checksum(tensor, Box.whole(shape), shape)


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The checksums of whole tensors, by name."""
    return added_up((name, whole_checksum(tensor)) for name, tensor in tensors.items())


def copy_and_sum(source: Tensor, target: Tensor, box: Box, shape: Shape) -> Tensor:
    """Copy `source` to `target`, and return the `checksum` of what `target` holds then.

    Block by block: on a CPU what was just written is read from the cache, where a second pass over
    the memory takes as long as the copy.
    """

    def copied() -> Iterator[Tensor]:
        for values, block in zip(_blocks_of(source), _blocks_of(target), strict=True):
            block.copy_(values)
            yield block

    return _sum_of(copied(), target, box, shape)


def added_up(sums: Iterable[NamedSum]) -> dict[str, int]:
    """The checksums of tensors, by name, from those of their boxes; the device is read once."""
    totals: dict[str, Tensor] = {}
    for name, part in sums:
        totals[name] = totals[name] + part if name in totals else part
    return (
        dict(zip(totals, torch.stack([*totals.values()]).tolist(), strict=True)) if totals else {}
    )


def _blocks_of(values: Tensor) -> Iterator[Tensor]:
    """Views [rows, columns] of the rows of `values` in their order."""
    if values.dim() > 2:
        yield from chain.from_iterable(map(_blocks_of, values))
        return
    rows = values if values.dim() == 2 else values.unsqueeze(0)
    block_bytes = CPU_BLOCK_BYTES if values.device.type == "cpu" else GPU_BLOCK_BYTES
    yield from rows.split(max(1, block_bytes // (rows.shape[1] * rows.element_size())))


def _sum_of(blocks: Iterable[Tensor], values: Tensor, box: Box, shape: Shape) -> Tensor:
    """The checksum of `blocks`, which are the rows of `values`."""
    assert tuple(values.shape) == box.size and values.element_size() in (1, 2, 4, 8)
    per_word = WORD_BYTES // values.element_size()
    first, last = box.start[-1], box.start[-1] + box.size[-1]
    # A word that the box has a part of: the rest are zeros here, and other boxes add theirs.
    padding = (first % per_word, -last % per_word)
    row_factors, column_factors = _factors(shape, per_word, values.device)
    row_factors = row_factors[box.slices[:-1]].flatten()
    column_factors = column_factors[first // per_word : -(-last // per_word)]
    row_sums, column_sums = [row_factors[:0]], torch.zeros_like(column_factors)
    for block in blocks:
        if any(padding):
            block = torch.nn.functional.pad(block, padding)
        flat = block.contiguous().view(-1)
        if flat.storage_offset() % per_word:  # torch reads words at multiples of 8 bytes only
            flat = flat.clone()
        words = flat.view(torch.int64).view(len(block), -1)
        row_sums.append(words.sum(1))
        column_sums += words.sum(0)
    return (torch.cat(row_sums) * row_factors).sum() + (column_sums * column_factors).sum()


@lru_cache(maxsize=256)
def _factors(shape: Shape, per_word: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of the rows of a tensor, with its dimensions but the last, and of its columns of words."""
    num_rows, num_columns = prod(shape[:-1]), -(-shape[-1] // per_word)
    rows = _random(2 * torch.arange(num_rows, device=device)) | 1
    columns = _random(2 * torch.arange(num_columns, device=device) + 1) & ~1
    return rows.view(shape[:-1]), columns


def _random(indices: Tensor) -> Tensor:
    """Pseudo-random int64 numbers, the same everywhere: the finalizer of SplitMix64.

    With arithmetic shifts in the place of logical ones, which torch has not.
    """
    x = (indices + 1) * -0x61C8864680B583EB
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)
