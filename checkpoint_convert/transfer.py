"""Weights from files into the places of other files, part by part, over several processes."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import torch

from checkpoint_convert.assembly import Assembly
from checkpoint_convert.safetensors_file import TensorPlace
from checkpoint_convert.tensor_io import TORCH_DTYPES, errors_named, write_box
from checkpoint_convert.weights import Weights
from checkpoint_convert.workers import add_bytes, run_tasks
from parallel import Layout, Piece

# A worker holds one part, and one box of the source that goes into it: so much memory, however
# large the tensors. The allocator keeps blocks of this size, so that pages are touched only once.
PART_BYTES = 16 << 20
# What a worker takes at a time, and then sees on the disk.
SHARE_BYTES = 256 << 20

Progress = Callable[[int, int], None]
"""Told now and then: bytes done, bytes in all."""


def transfer(
    weights: Weights,
    layout: Layout,
    places: Mapping[str, TensorPlace],
    num_workers: int,
    progress: Progress,
) -> None:
    """Write every element of the tensors that `layout` describes to their `places`.

    The files are there, at their full size. Values are converted to the dtypes of the places. On
    return the data are on the disk.
    """
    itemsize = max(TORCH_DTYPES[place.dtype].itemsize for place in places.values())
    parts = Layout.of_parts(layout.shapes, PART_BYTES // itemsize)
    assembly = Assembly(weights, parts.through(layout))
    largest = max(torch.finfo(dtype).max for dtype in weights.tensors.dtypes.values())
    narrow = [dtype for dtype in TORCH_DTYPES.values() if torch.finfo(dtype).max < largest]

    def write_share(share: Sequence[Piece]) -> None:
        path = places[share[0].tensor].file
        with errors_named(path), path.open("r+b", buffering=0) as file:
            for part in share:
                place = places[part.tensor]
                values = torch.empty(part.box.size, dtype=TORCH_DTYPES[place.dtype])
                assembly.fill(part.local, values)
                if values.dtype in narrow and not values.isfinite().all():
                    raise ValueError(
                        f"{part.tensor} has values that {values.dtype} cannot hold: choose a "
                        "--dtype with a larger range"
                    )
                write_box(file.fileno(), place, part.box, values)
                add_bytes(values.nbytes)
            os.fsync(file)

    def size_of(part: Piece) -> int:
        return part.box.num_elements * TORCH_DTYPES[places[part.tensor].dtype].itemsize

    num_bytes = sum(place.num_bytes for place in places.values())
    in_order = sorted(parts.pieces, key=lambda part: _position(places[part.tensor]))
    shares = [
        share
        for _, in_file in groupby(in_order, key=lambda part: places[part.tensor].file)
        for share in shares_of(in_file, size_of)
    ]
    run_tasks(write_share, shares, num_workers, lambda done: progress(done, num_bytes))


def shares_of(parts: Iterable[Piece], size_of: Callable[[Piece], int]) -> Iterator[list[Piece]]:
    """The parts in order, by some `SHARE_BYTES`."""
    share: list[Piece] = []
    room = SHARE_BYTES
    for part in parts:
        share.append(part)
        room -= size_of(part)
        if room <= 0:
            yield share
            share, room = [], SHARE_BYTES
    if share:
        yield share


def _position(place: TensorPlace) -> tuple[str, int]:
    return str(place.file), place.offset
