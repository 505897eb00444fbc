"""Reads and writes boxes of stored tensors at their offsets in the file.

Uses plain reads and writes rather than a memory map: mapping a file larger than memory may be
refused, and network file systems serve page faults slowly and share mapped pages badly between
hosts.
"""

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import product
from math import isfinite, prod
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from checkpoint_convert.formats import errors_named
from checkpoint_convert.formats.safetensors_file import TensorPlace
from checkpoint_convert.formats.torch_dtypes import DTYPES
from parallel import Box, Shape

# Linux allocates one large piece of page cache per call; finding 1 MiB of contiguous memory can
# cost several times the copy. With aligned calls of 64 KiB, writing is as fast as `cp`.
_WRITE_BYTES = 1 << 16
# A checkpoint of a thousand ranks has two thousand files; a process may open about 1,000.
_MAX_OPEN_FILES = 256
_SYNC_FILE_RANGE_WRITE = 2  # of sync_file_range(2)
_libc = ctypes.CDLL(None)


class NotFiniteError(ValueError):
    """A stored tensor has NaN or infinite values."""


class TensorSource(Protocol):
    """Tensors that are read box by box."""

    dtypes: Mapping[str, str]
    """Stored dtype of every tensor, by its name in safetensors."""

    def read_into(self, name: str, box: Box, target: Tensor) -> None:
        """Put `box` of a tensor into `target`, of that shape and the stored dtype, on the CPU."""


class StoredTensors:
    """The tensors of some files.

    Files are opened at first use and kept open; for one thread, and for the workers it forks.
    """

    must_be_finite = True
    """Whether a NaN or infinite value is a ValueError that names its tensor."""

    def __init__(self, places: Mapping[str, TensorPlace]) -> None:
        self.dtypes: Mapping[str, str] = {name: place.dtype for name, place in places.items()}
        self._places = places
        self._descriptors: dict[Path, int] = {}

    def read_into(self, name: str, box: Box, target: Tensor) -> None:
        place = self._place(name)
        read_box(self._descriptor(place.file), place, box, target)
        self.check_finite(name, place, target)

    def check_finite(self, name: str, place: TensorPlace, values: Tensor) -> None:
        """Raise NotFiniteError for NaN or infinite values, if `must_be_finite`."""
        if self.must_be_finite and not is_finite(values):
            kind = "NaN" if values.isnan().any() else "infinite"
            raise NotFiniteError(
                f"{name} has values that are not finite ({kind}), in {place.file}: the weights are "
                "damaged, or were saved after training diverged; take an earlier or another copy"
            )

    def close(self) -> None:
        """Close all files; they are reopened when used again."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _place(self, name: str) -> TensorPlace:
        return self._places[name]

    def _descriptor(self, path: Path) -> int:
        """A file descriptor for reading `path`; valid only until the next call."""
        if path not in self._descriptors:
            if len(self._descriptors) == _MAX_OPEN_FILES:
                # The file that was opened first.
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            self._descriptors[path] = os.open(path, os.O_RDONLY)
        return self._descriptors[path]


def is_finite(values: Tensor) -> bool:
    """Whether none of the values is NaN or infinite."""
    # `aminmax` returns NaN if any value is NaN, and is many times as fast as torch.isfinite.
    return not values.numel() or all(isfinite(each) for each in torch.aminmax(values))


def check_values(places: Mapping[str, TensorPlace]) -> None:
    """Read some tensors, one at a time; ValueError for the first that is not finite."""
    with closing(StoredTensors(places)) as stored:
        for name, place in places.items():
            values = torch.empty(place.shape, dtype=DTYPES[place.dtype])
            stored.read_into(name, Box.whole(place.shape), values)


def same_values(a: TensorPlace, b: TensorPlace, max_elements: int = 1 << 20) -> bool:
    """Whether two stored tensors of one shape have the same values, in any dtypes."""

    def read(name: str, box: Box) -> Tensor:
        values = torch.empty(box.size, dtype=DTYPES[stored.dtypes[name]])
        stored.read_into(name, box, values)
        return values.double()

    with closing(StoredTensors({"a": a, "b": b})) as stored:
        stored.must_be_finite = False
        boxes = Box.whole(a.shape).cut(max_elements)
        return all(torch.equal(read("a", box), read("b", box)) for box in boxes)


_SHORT_ROW_BYTES = 16
_SHORT_HALVES_BYTES = 1 << 14


def whole_rows(shape: Shape, box: Box, itemsize: int) -> Box:
    """Widen `box` to whole rows of a stored tensor if rows are short; else return `box`."""
    # Gate and up may alternate: each is one element of every row of two.
    if shape and shape[-1] * itemsize <= _SHORT_ROW_BYTES:
        first = len(shape) - 1
    # Or they are the halves of rows, in stacks [experts, inputs, 2, outputs].
    elif len(shape) == 4 and shape[2] == 2 and 2 * shape[3] * itemsize <= _SHORT_HALVES_BYTES:
        first = 2
    else:
        return box
    rest = len(shape) - first
    return Box((*box.start[:first], *[0] * rest), (*box.size[:first], *shape[first:]))


def read_box(descriptor: int, place: TensorPlace, box: Box, target: Tensor) -> None:
    """Read `box` of a stored tensor into `target`; without a copy if that is contiguous.

    Short rows are read whole: each element of one column would be a read of its own.
    """
    rows = whole_rows(place.shape, box, target.itemsize)
    if rows != box:
        values = torch.empty(rows.size, dtype=target.dtype)
        read_box(descriptor, place, rows, values)
        target.copy_(values[box.moved(rows.start, (0,) * len(rows.start)).slices])
        return
    values = target if target.is_contiguous() else torch.empty(box.size, dtype=target.dtype)
    with errors_named(place.file):
        for part, position in _runs(values, place, box):
            while part:  # one call reads at most 2 GiB
                # Not read(): forked workers share the descriptor, and thus its position.
                num_bytes = os.preadv(descriptor, [part], position)
                if num_bytes == 0:
                    raise ValueError(f"{place.file} ended at byte {position} while it was read")
                part, position = part[num_bytes:], position + num_bytes
    if values is not target:
        target.copy_(values)


def write_box(descriptor: int, place: TensorPlace, box: Box, values: Tensor) -> None:
    """Store `values` (shape `box.size`, on the CPU) as `box` of a stored tensor of their dtype."""
    for part, position in _runs(values.contiguous(), place, box):
        while part:
            room = _WRITE_BYTES - position % _WRITE_BYTES
            num_bytes = os.pwrite(descriptor, part[:room], position)
            part, position = part[num_bytes:], position + num_bytes


def start_syncing(descriptor: int) -> None:
    """Let Linux start writing a file's dirty pages to disk, without waiting for it.

    A failure is reported by the fsync that waits for the data.
    """
    whole = ctypes.c_int64(0), ctypes.c_int64(0)
    _libc.sync_file_range(descriptor, *whole, _SYNC_FILE_RANGE_WRITE)


def _runs(values: Tensor, place: TensorPlace, box: Box) -> Iterator[tuple[memoryview, int]]:
    """The bytes of `values` as runs that are contiguous in the file, each with its file offset."""
    # Not `numpy()`, after which the storage could not be freed in place: see `policy/residency.py`.
    data = np.from_dlpack(values.view(-1).view(torch.uint8)).data
    starts, length = _run_starts(place.shape, box)
    num_bytes = length * values.itemsize
    for i, start in enumerate(starts):
        yield data[i * num_bytes : (i + 1) * num_bytes], place.offset + start * values.itemsize


def _run_starts(shape: Shape, box: Box) -> tuple[list[int], int]:
    """First elements and common length of the runs of consecutive elements that make up `box`."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = len(shape) - 1
    # Dimensions from `inner` on form one run: all that follow it are whole.
    while inner > 0 and box.size[inner] == shape[inner]:
        inner -= 1
    first = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    # Not strict: there are strides for inner dimensions, too.
    outer = [range(0, n * s, s) for n, s in zip(box.size[:inner], strides, strict=False)]
    return [first + sum(steps) for steps in product(*outer)], box.size[inner] * strides[inner]
