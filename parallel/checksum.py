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

import ctypes
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, repeat
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from parallel.layout import Box, Shape

WORD_BYTES = 8
CPU_BLOCK_BYTES = 1 << 19
"""Written and then read: in the cache of the core."""
GPU_BLOCK_BYTES = 1 << 28
"""Bounds the copy of values that are not laid out row by row."""


NamedSum = tuple[str, Tensor]
"""Name of a tensor, and what a box of it adds to its checksum."""


def checksum(values: Tensor, box: Box, shape: Shape) -> Tensor:
    """What `values`, `box` of a tensor of `shape`, add to the tensor's checksum.

    Returns an int64 scalar on the device of `values`, to be added up with those of other boxes;
    int64 overflows as it should.
    """
    if values.device.type == "cpu":
        return _sum_on_cpu(None, values, box, shape)
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
        return _sum_on_cpu(source, target, box, shape)
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
    row_factors, column_factors = _factors(shape, per_word, values.device)
    row_factors = row_factors[box.slices[:-1]].flatten()
    column_factors = column_factors[first // per_word : -(-last // per_word)]
    row_sums, column_sums = [row_factors[:0]], torch.zeros_like(column_factors)
    for block in chain.from_iterable(map(_blocks_of, _matrices_of(values))):
        if any(padding):
            block = torch.nn.functional.pad(block, padding)
        flat = block.contiguous().view(-1)
        if flat.storage_offset() % per_word:  # torch reads words at multiples of 8 bytes only
            flat = flat.clone()
        words = flat.view(torch.int64).view(len(block), -1)
        row_sums.append(words.sum(1))
        column_sums += words.sum(0)
    return (torch.cat(row_sums) * row_factors).sum() + (column_sums * column_factors).sum()


def _sum_on_cpu(source: Tensor | None, target: Tensor, box: Box, shape: Shape) -> Tensor:
    """The checksum of `target`, to which `source` is copied first unless it is None."""
    item_bytes = target.element_size()
    assert tuple(target.shape) == box.size and item_bytes in (1, 2, 4, 8)
    row_factors, column_factors = _factors(shape, WORD_BYTES // item_bytes, target.device)
    first_word, offset = divmod(box.start[-1] * item_bytes, WORD_BYTES)
    total = torch.zeros((), dtype=torch.int64)
    for first_row, values, copy in _passes(source, target, _first_rows(box, shape)):
        _KERNEL.add_rows(
            values.data_ptr(),
            None if copy is None else copy.data_ptr(),
            values.shape[0],
            values.shape[1] * item_bytes,
            values.stride(0) * item_bytes,
            0 if copy is None else copy.stride(0) * item_bytes,
            offset,
            row_factors.data_ptr() + first_row * WORD_BYTES,
            column_factors.data_ptr() + first_word * WORD_BYTES,
            total.data_ptr(),
        )
    return total


def _passes(
    source: Tensor | None, target: Tensor, first_rows: Sequence[int]
) -> Iterable[tuple[int, Tensor, Tensor | None]]:
    """Rows to be summed, with the number of the first, and where to copy them at the same time.

    `first_rows` are those of the matrices of `target`.
    """
    values = target if source is None else source
    if values.dtype != target.dtype or not values.stride(-1) == target.stride(-1) == 1:
        return _copied_blocks(values, target, first_rows)
    copies = repeat(None) if source is None else _matrices_of(target)
    return zip(first_rows, _matrices_of(values), copies, strict=False)


def _copied_blocks(
    source: Tensor, target: Tensor, first_rows: Sequence[int]
) -> Iterator[tuple[int, Tensor, None]]:
    """What is not rows of one dtype, copied here: each block is still in the cache when it comes.

    `source` may be `target` itself.
    """
    matrices = zip(first_rows, _matrices_of(source), _matrices_of(target), strict=True)
    for row, values, copies in matrices:
        for block, copy in zip(_blocks_of(values), _blocks_of(copies), strict=True):
            if source is not target:
                copy.copy_(block)
            yield row, copy.contiguous(), None
            row += len(copy)


def _first_rows(box: Box, shape: Shape) -> list[int]:
    """The numbers of the rows at which the matrices of a box begin, in their order."""
    if len(shape) <= 2:
        return [box.start[0] if len(shape) == 2 else 0]
    matrices = torch.arange(prod(shape[:-2])).view(shape[:-2])[box.slices[:-2]].flatten()
    return (matrices * shape[-2] + box.start[-2]).tolist()


def _matrices_of(values: Tensor) -> list[Tensor]:
    """Views [rows, columns] of the rows of `values` in their order."""
    if values.dim() > 2:
        return [*chain.from_iterable(map(_matrices_of, values))]
    return [values if values.dim() == 2 else values.unsqueeze(0)]


def _blocks_of(rows: Tensor) -> Sequence[Tensor]:
    """The rows of a matrix, as many at a time as are not too large."""
    block_bytes = CPU_BLOCK_BYTES if rows.device.type == "cpu" else GPU_BLOCK_BYTES
    return rows.split(max(1, block_bytes // (rows.shape[1] * rows.element_size())))


def _load_kernel() -> ctypes.CDLL:
    """checksum_kernel.c, as it was compiled when this package was installed."""
    path = Path(__file__).with_name("checksum_kernel" + sysconfig.get_config_var("EXT_SUFFIX"))
    if not path.exists():
        raise ImportError(f"{path} is missing: `make setup` builds it")
    kernel = ctypes.CDLL(str(path))  # other threads may use Python while it runs
    address, size, stride = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_ssize_t
    kernel.add_rows.argtypes = [
        *(address, address, size, size, stride, stride, size),
        *(address, address, address),
    ]
    kernel.add_rows.restype = None
    return kernel


_KERNEL = _load_kernel()


@lru_cache(maxsize=256)
def _factors(shape: Shape, per_word: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of the rows of a tensor, with its dimensions but the last, and of its columns of words."""
    num_rows, num_columns = prod(shape[:-1]), -(-shape[-1] // per_word)
    rows = _random(2 * torch.arange(num_rows, device=device)) | 1
    columns = _random(2 * torch.arange(num_columns, device=device) + 1) & ~1
    if device.type == "cuda":  # what is kept here is used on other streams as well
        torch.cuda.current_stream(device).synchronize()
    return rows.view(shape[:-1]), columns


def _random(indices: Tensor) -> Tensor:
    """Pseudo-random int64 numbers, the same everywhere: the finalizer of SplitMix64.

    With arithmetic shifts in the place of logical ones, which torch has not.
    """
    x = (indices + 1) * -0x61C8864680B583EB
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)
