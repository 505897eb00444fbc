"""64-bit checksums of tensors that can be summed box by box, in any order, on any machine.

Computed from the raw bytes, as 64-bit words x[r, c] of the tensor's rows (all dimensions but the
last, flattened), modulo 2^64:

    sum over r, c of (a[r] + b[c]) * x[r, c],    a[r] odd, b[c] even, both fixed random numbers

The factor of a word is odd, so a single changed element is always detected. It depends on row and
column, so exchanged rows, columns or halves, which a plain sum would miss, are detected as well.
Changes of many words go undetected if they preserve the sums of every row and every column, else
with probability 2^-64. Zeros add nothing, and the checksums of a tensor's boxes add up to its own:
ranks sum their boxes, and one all-reduce gives the checksum of the whole tensor.

Sums over rows and columns need no product per word: several times faster than a factor per word.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import prod

import torch
from torch import Tensor

from parallel.layout import Box, Shape

WORD_BYTES = 8


@cache  # unlimited: a full cache would free factors that other streams may still read
def factors_of(shape: Shape, per_word: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Factors a of the rows, of shape `shape[:-1]`, and b of the word columns, [words in a row]."""
    num_rows, num_columns = prod(shape[:-1]), -(-shape[-1] // per_word)
    # Even and odd indices: no row and column share a random number.
    rows = _random(2 * torch.arange(num_rows, device=device)) | 1
    columns = _random(2 * torch.arange(num_columns, device=device) + 1) & ~1
    if device.type == "cuda":  # other streams use the cached tensors, too
        torch.cuda.current_stream(device).synchronize()
    return rows.view(shape[:-1]), columns


def _random(indices: Tensor) -> Tensor:
    """Pseudo-random int64 numbers, the same on every machine: the finalizer of SplitMix64.

    With arithmetic shifts instead of logical ones, which torch lacks.
    """
    # The published constants as signed numbers: the first is 0x9E3779B97F4A7C15 - 2^64.
    x = (indices + 1) * -0x61C8864680B583EB
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)


@dataclass(frozen=True, slots=True)
class BoxCopy:
    """Copy `source` to `target`, which is `box` of tensor `name` of `shape`, and checksum it."""

    name: str
    source: Tensor
    target: Tensor
    box: Box
    shape: Shape


GPU_BLOCK_BYTES = 1 << 28
"""Maximum size of temporary copies of values that are not contiguous, on a GPU."""
CPU_BLOCK_BYTES = 1 << 20
"""Bytes that a CPU sums by row and then by column: few enough to stay in its cache meanwhile."""

NamedSum = tuple[str, Tensor]
"""Name of a tensor, and the contribution of one box to the tensor's checksum."""


def checksum(values: Tensor, box: Box, shape: Shape) -> Tensor:
    """Contribution of `values`, the `box` of a tensor of `shape`, to the tensor's checksum.

    Returns an int64 scalar on the device of `values`. The contributions of all boxes add up; int64
    overflow gives the sum modulo 2^64.
    """
    values = values.detach()
    assert tuple(values.shape) == box.size and values.element_size() in (1, 2, 4, 8)
    if values.element_size() == 1:  # torch does not pad floats of 8 bits
        values = values.view(torch.uint8)
    per_word = WORD_BYTES // values.element_size()
    first, last = box.start[-1], box.start[-1] + box.size[-1]
    # Words that lie only partly in the box are filled with zeros; other boxes add their parts.
    padding = (first % per_word, -last % per_word)
    row_factors, column_factors = factors_of(shape, per_word, values.device)
    row_factors = row_factors[box.slices[:-1]].flatten()
    column_factors = column_factors[first // per_word : -(-last // per_word)]
    row_sums, column_sums = [row_factors[:0]], torch.zeros_like(column_factors)
    if values.is_contiguous():  # one matrix: a stack of experts would take kernels for each
        values = values.view(-1, values.shape[-1])
    row_bytes = values.shape[-1] * values.element_size()
    block_bytes = CPU_BLOCK_BYTES if values.device.type == "cpu" else GPU_BLOCK_BYTES
    blocks = [matrix.split(max(1, block_bytes // row_bytes)) for matrix in _matrices(values)]
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


def _matrices(values: Tensor) -> list[Tensor]:
    """Split `values` into views [rows, columns], in order."""
    if values.dim() > 2:
        return [*chain.from_iterable(map(_matrices, values))]
    return [values if values.dim() == 2 else values.unsqueeze(0)]


def whole_checksum(tensor: Tensor) -> Tensor:
    shape = tuple(tensor.shape)
    return checksum(tensor, Box.whole(shape), shape)


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return added_up((name, whole_checksum(tensor)) for name, tensor in tensors.items())


def copied_and_summed(copies: Iterable[BoxCopy]) -> Iterator[NamedSum]:
    """Make the copies; yields contributions that add up to the checksums of their tensors."""

    def made() -> Iterator[BoxCopy]:
        for copy in copies:
            copy.target.copy_(copy.source)
            yield copy

    for copy in joined(made()):
        yield copy.name, checksum(copy.target, copy.box, copy.shape)


def joined(copies: Iterable[BoxCopy]) -> Iterator[BoxCopy]:
    """Merge targets of `copies` that follow each other in the rows of a tensor and in memory.

    While the kernels of a checksum start, a GPU could read megabytes, and a bucket may have
    thousands of boxes of experts.
    """
    run: list[BoxCopy] = []
    for copy in copies:
        if run and not _follows(copy, run[-1]):
            yield _joined(run)
            run = []
        run.append(copy)
    if run:
        yield _joined(run)


def _follows(copy: BoxCopy, before: BoxCopy) -> bool:
    rows, rows_before = _rows(copy), _rows(before)
    return (
        copy.name == before.name
        and rows is not None
        and rows_before is not None
        and rows.start == rows_before.stop
        and copy.box.start[-1] == before.box.start[-1]
        and copy.box.size[-1] == before.box.size[-1]
        and copy.target.data_ptr() == before.target.data_ptr() + before.target.nbytes
    )


def _rows(copy: BoxCopy) -> range | None:
    """Rows of the tensor that a box covers; None unless consecutive, in tensor and memory."""
    first, is_split = 0, False
    for start, size, extent in zip(
        copy.box.start[:-1], copy.box.size[:-1], copy.shape[:-1], strict=True
    ):
        if is_split and size < extent:
            return None
        first, is_split = first * extent + start, is_split or size > 1
    return range(first, first + prod(copy.box.size[:-1])) if copy.target.is_contiguous() else None


def _joined(run: Sequence[BoxCopy]) -> BoxCopy:
    if len(run) == 1:
        return run[0]
    first, rows = run[0], _rows(run[0])
    assert rows is not None, "only boxes of consecutive rows are joined"
    column, width = first.box.start[-1], first.box.size[-1]
    num_rows = sum(prod(copy.box.size[:-1]) for copy in run)
    # The targets follow each other in memory, see `_follows`: one view spans them.
    target = first.target.as_strided((num_rows, width), (width, 1))
    box, shape = Box((rows.start, column), (num_rows, width)), first.shape
    return BoxCopy(first.name, target, target, box, (prod(shape[:-1]), shape[-1]))


def added_up(sums: Iterable[NamedSum]) -> dict[str, int]:
    """Checksums by name of the tensor, from contributions of boxes; reads the device once."""
    totals: dict[str, Tensor] = {}
    for name, part in sums:
        totals[name] = totals[name] + part if name in totals else part
    return (
        dict(zip(totals, torch.stack([*totals.values()]).tolist(), strict=True)) if totals else {}
    )
