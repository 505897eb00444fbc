"""Boxes of stored tensors, read and written at their offsets in the file.

Plain reads and writes, not a memory map: a map of a file larger than memory may be refused, and
network file systems serve its page faults slowly and share its pages badly between hosts.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from checkpoint_convert.safetensors_file import TensorPlace
from parallel import Box, Shape

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# What may be read: values, and bytes that are none yet, such as the blocks of a quantized tensor.
_READABLE = {**TORCH_DTYPES, "U8": torch.uint8}
# Linux takes one call for one large piece of page cache; to find 16 MiB of it in a row can cost
# several times the copy. With calls of 1 MiB, writing is as fast as `cp`.
_WRITE_BYTES = 1 << 20
# A checkpoint of a thousand ranks has two thousand files; a process may open some 1,000.
_MAX_OPEN_FILES = 256


class OpenFiles:
    """Files that are opened at their first use and kept open, for one thread.

    Every read names its position, so workers that are forked may share them. Files that are pickled
    along are opened anew on the other side.
    """

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def descriptor(self, path: Path) -> int:
        """A file descriptor to read `path` with; not to be kept."""
        if path not in self._descriptors:
            if len(self._descriptors) == _MAX_OPEN_FILES:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            self._descriptors[path] = os.open(path, os.O_RDONLY)
        return self._descriptors[path]

    def close(self) -> None:
        """Close all; they may be used again."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __getstate__(self) -> dict[str, Any]:
        return {"_descriptors": {}}


class TensorSource(ABC):
    """Tensors that are read box by box."""

    dtypes: Mapping[str, torch.dtype]
    """Stored dtype of every tensor."""

    @abstractmethod
    def read(self, name: str, box: Box) -> Tensor:
        """Values of `box` of a tensor, on the CPU, in the stored dtype; shape `box.size`."""

    def read_into(self, name: str, box: Box, target: Tensor) -> None:
        """Put values into `target`, of shape `box.size` and of any dtype, strides or device."""
        target.copy_(self.read(name, box))

    @abstractmethod
    def close(self) -> None:
        """Close the files."""


class StoredTensors(TensorSource):
    """The tensors of some files, read box by box."""

    def __init__(self, places: Mapping[str, TensorPlace]) -> None:
        self.shapes = {name: place.shape for name, place in places.items()}
        self.dtypes = {name: _READABLE[place.dtype] for name, place in places.items()}
        self._places = places
        self._files = OpenFiles()

    def read(self, name: str, box: Box) -> Tensor:
        """Values of `box` of a tensor, on the CPU, in the stored dtype; shape `box.size`."""
        place = self._place(name)
        return read_box(self._files.descriptor(place.file), place, box)

    def read_into(self, name: str, box: Box, target: Tensor) -> None:
        """Read straight into `target` where it is laid out as the file is."""
        place = self._place(name)
        read_box_into(self._files.descriptor(place.file), place, box, target)

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _place(self, name: str) -> TensorPlace:
        return self._places[name]


def read_box(descriptor: int, place: TensorPlace, box: Box) -> Tensor:
    """Values of `box` of a stored tensor, on the CPU, in the stored dtype; shape `box.size`."""
    values = torch.empty(box.size, dtype=_READABLE[place.dtype])
    _read(descriptor, place, box, values)
    return values


def read_box_into(descriptor: int, place: TensorPlace, box: Box, target: Tensor) -> None:
    """Read `box` straight into `target` where it is laid out as the file is, else by a copy."""
    is_alike = target.dtype == _READABLE[place.dtype] and target.device.type == "cpu"
    if is_alike and target.is_contiguous():
        _read(descriptor, place, box, target)
    else:
        target.copy_(read_box(descriptor, place, box))


def _read(descriptor: int, place: TensorPlace, box: Box, values: Tensor) -> None:
    with errors_named(place.file):
        for part, position in _runs(values, place, box):
            while part:  # one call reads at most 2 GiB
                num_bytes = os.preadv(descriptor, [part], position)
                if num_bytes == 0:
                    raise ValueError(f"{place.file} ended at byte {position} while it was read")
                part, position = part[num_bytes:], position + num_bytes


def write_box(descriptor: int, place: TensorPlace, box: Box, values: Tensor) -> None:
    """Store `values` (shape `box.size`) as `box` of a stored tensor, in the stored dtype."""
    values = values.to("cpu", TORCH_DTYPES[place.dtype]).contiguous()
    for part, position in _runs(values, place, box):
        while part:
            num_bytes = os.pwrite(descriptor, part[:_WRITE_BYTES], position)
            part, position = part[num_bytes:], position + num_bytes


@contextmanager
def errors_named(path: Path) -> Iterator[None]:
    """Tell the file in errors of the system, which know descriptors by their numbers only."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _runs(values: Tensor, place: TensorPlace, box: Box) -> Iterator[tuple[memoryview, int]]:
    """The bytes of `values`, cut where `box` is cut in the file, each with its place there."""
    data = values.view(-1).view(torch.uint8).numpy().data
    item_size = values.element_size()
    starts, length = _run_starts(place.shape, box)
    num_bytes = length * item_size
    for i, start in enumerate(starts):
        yield data[i * num_bytes : (i + 1) * num_bytes], place.offset + start * item_size


def _run_starts(shape: Shape, box: Box) -> tuple[list[int], int]:
    """First elements and common length of the runs of consecutive elements that make up `box`."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = len(shape) - 1
    while inner > 0 and box.size[inner] == shape[inner]:
        inner -= 1
    first = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    outer = [range(0, n * s, s) for n, s in zip(box.size[:inner], strides, strict=False)]
    return [first + sum(steps) for steps in product(*outer)], box.size[inner] * strides[inner]
