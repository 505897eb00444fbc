"""Checksums on a CPU: checksum_kernel.c sums rows while it copies them."""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import prod

import numpy as np
import torch
from torch import Tensor

from parallel.checksum_factors import WORD_BYTES, factors_of
from parallel.kernels import load_kernel
from parallel.layout import Box, Shape
from parallel.views import matrices_of

BLOCK_BYTES = 1 << 19
"""Size of blocks that are written and then read: they stay in the core's cache."""


@dataclass(frozen=True, slots=True)
class BoxCopy:
    """Copy `source` to `target`, which is `box` of tensor `name` of `shape`, and checksum it.

    If `source` is `target`, nothing is copied.
    """

    name: str
    source: Tensor
    target: Tensor
    box: Box
    shape: Shape


class PreparedCopies:
    """Copies that are repeated between the same addresses in memory.

    The memory must stay valid; this object does not keep the tensors alive.
    """

    def __init__(self, copies: Sequence[BoxCopy]) -> None:
        self._names = {name: number for number, name in enumerate({c.name: None for c in copies})}
        self._totals = np.zeros(len(self._names), dtype=np.int64)
        self._factors: list[tuple[Tensor, Tensor]] = []  # kept alive: pieces hold their addresses
        self._others = [copy for copy in copies if not _is_rows(copy)]
        self._pieces = _as_pieces(
            piece
            for copy in copies
            if _is_rows(copy)
            for piece in self._pieces_of(copy, _passes(copy))
        )

    def make(self) -> list[tuple[str, Tensor]]:
        """Make the copies; returns (name, int64 scalar): the sum over all boxes of each tensor."""
        self._totals[:] = 0
        _add(self._pieces)
        num_kept = len(self._factors)
        for copy in self._others:
            for block in _copied_blocks(copy):
                _add(_as_pieces(self._pieces_of(copy, [block])))
        del self._factors[num_kept:]
        return list(zip(self._names, torch.from_numpy(self._totals.copy()).unbind(), strict=True))

    def _pieces_of(
        self, copy: BoxCopy, passes: Iterable[tuple[int, Tensor, Tensor | None]]
    ) -> Iterator[tuple[int, ...]]:
        """The kernel's description of some rows; see `struct piece`."""
        item_bytes = copy.target.element_size()
        assert tuple(copy.target.shape) == copy.box.size and item_bytes in (1, 2, 4, 8)
        factors = factors_of(copy.shape, WORD_BYTES // item_bytes, copy.target.device)
        self._factors.append(factors)
        rows, columns = (each.data_ptr() for each in factors)
        first_word, offset = divmod(copy.box.start[-1] * item_bytes, WORD_BYTES)
        for first_row, values, target in passes:
            yield (
                values.data_ptr(),
                0 if target is None else target.data_ptr(),
                values.shape[0],
                values.shape[1] * item_bytes,
                values.stride(0) * item_bytes,
                0 if target is None else target.stride(0) * item_bytes,
                offset,
                rows + first_row * WORD_BYTES,
                columns + first_word * WORD_BYTES,
                self._totals.ctypes.data + self._names[copy.name] * WORD_BYTES,
            )


def _is_rows(copy: BoxCopy) -> bool:
    """Whether the kernel can make the copy: contiguous rows of the same dtype."""
    source, target = copy.source, copy.target
    return source.dtype == target.dtype and source.stride(-1) == target.stride(-1) == 1


def _passes(copy: BoxCopy) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """(number of the first row, rows to sum, where to copy them or None)."""
    first_rows = _first_rows(copy.box, copy.shape)
    if copy.source is copy.target:
        return zip(first_rows, matrices_of(copy.target), repeat(None), strict=False)
    return zip(first_rows, matrices_of(copy.source), matrices_of(copy.target), strict=True)


def _copied_blocks(copy: BoxCopy) -> Iterator[tuple[int, Tensor, None]]:
    """Copies what the kernel cannot, by blocks, which are still in the cache when summed."""
    matrices = zip(
        _first_rows(copy.box, copy.shape),
        matrices_of(copy.source),
        matrices_of(copy.target),
        strict=True,
    )
    for row, values, targets in matrices:
        # The same number of rows of both at a time, even if their dtypes differ.
        rows = max(1, BLOCK_BYTES // max(_row_bytes(values), _row_bytes(targets)))
        for block, target in zip(values.split(rows), targets.split(rows), strict=True):
            if copy.source is not copy.target:
                target.copy_(block)
            yield row, target.contiguous(), None
            row += len(target)


def _row_bytes(matrix: Tensor) -> int:
    return matrix.shape[1] * matrix.element_size()


def _first_rows(box: Box, shape: Shape) -> list[int]:
    """The number of the first row of each matrix of a box, in order."""
    if len(shape) <= 2:
        return [box.start[0] if len(shape) == 2 else 0]
    matrices = torch.arange(prod(shape[:-2])).view(shape[:-2])[box.slices[:-2]].flatten()
    return (matrices * shape[-2] + box.start[-2]).tolist()


def _as_pieces(pieces: Iterable[tuple[int, ...]]) -> np.ndarray:
    """An array of `struct piece`."""
    return np.array(list(pieces), dtype=np.int64)


def _add(pieces: np.ndarray) -> None:
    _KERNEL.add_pieces(pieces.ctypes.data, len(pieces))


def _load_kernel() -> ctypes.CDLL:
    kernel = load_kernel("checksum_kernel")
    kernel.add_pieces.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    kernel.add_pieces.restype = None
    return kernel


_KERNEL = _load_kernel()
