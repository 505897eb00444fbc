"""Boxes of stored tensors, read and written at their offsets in the file.

Plain reads and writes, not a memory map: a map of a file larger than memory may be refused, and
network file systems serve its page faults slowly and share its pages badly between hosts.
"""

import os
from collections.abc import Iterator
from itertools import product
from math import prod

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


def read_box(descriptor: int, place: TensorPlace, box: Box) -> Tensor:
    """Values of `box` of a stored tensor, on the CPU, in the stored dtype; shape `box.size`."""
    values = torch.empty(box.size, dtype=TORCH_DTYPES[place.dtype])
    for part, position in _runs(values, place, box):
        while part:  # one call reads at most 2 GiB
            num_bytes = os.preadv(descriptor, [part], position)
            if num_bytes == 0:
                raise ValueError(f"{place.file} ended at byte {position} while it was read")
            part, position = part[num_bytes:], position + num_bytes
    return values


def write_box(descriptor: int, place: TensorPlace, box: Box, values: Tensor) -> None:
    """Store `values` (shape `box.size`) as `box` of a stored tensor, in the stored dtype."""
    values = values.to("cpu", TORCH_DTYPES[place.dtype]).contiguous()
    for part, position in _runs(values, place, box):
        while part:  # one call writes at most 2 GiB
            num_bytes = os.pwrite(descriptor, part, position)
            part, position = part[num_bytes:], position + num_bytes


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
