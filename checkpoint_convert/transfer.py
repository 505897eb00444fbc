"""Copies weights from files to places in other files, part by part, with several processes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from checkpoint_convert.assembly import Assembly
from checkpoint_convert.formats.safetensors_file import ITEM_SIZES, TensorPlace
from checkpoint_convert.formats.tensor_io import errors_named, start_syncing, write_box
from checkpoint_convert.formats.values import LARGEST, WORDS, Words, floats
from checkpoint_convert.weights import Weights
from checkpoint_convert.whole_rows import WholeRows
from checkpoint_convert.workers import add_bytes, run_tasks
from parallel import Layout, Piece, Shape

# A worker holds one part at a time, however large the tensors, plus the whole rows that contain its
# columns or, if dtypes differ, the source box. Small enough to stay in the CPU cache.
PART_BYTES = 4 << 20
# The amount of work that a worker takes at a time.
SHARE_BYTES = 64 << 20

Progress = Callable[[int, int], None]
"""Called from time to time with (bytes done, total bytes)."""


def transfer(
    weights: Weights,
    layout: Layout,
    places: Mapping[str, TensorPlace],
    num_workers: int,
    progress: Progress,
) -> None:
    """Write every element of the tensors that `layout` describes to their `places`.

    The files must exist at their full size. Values are converted to the dtypes of the places.
    Writing to disk is started; waiting for it is up to the caller.
    """
    itemsize = max(ITEM_SIZES[place.dtype] for place in places.values())
    parts = Layout.of_parts(layout.shapes, PART_BYTES // itemsize)
    assembly = Assembly(replace(weights, tensors=WholeRows(weights)), parts.through(layout))

    def size_of(part: Piece) -> int:
        return part.box.num_elements * ITEM_SIZES[places[part.tensor].dtype]

    def write_share(share: Sequence[Piece]) -> None:
        # The first touch of memory costs more than a copy, so all parts reuse the same buffer.
        memory = np.empty(PART_BYTES, np.uint8)
        with ExitStack() as stack:
            files = {
                path: stack.enter_context(path.open("r+b", buffering=0)).fileno()
                for path in {places[part.tensor].file for part in share}
            }
            for part in share:
                place = places[part.tensor]
                words = memory[: size_of(part)].view(WORDS[place.dtype]).reshape(part.box.size)
                assembly.fill(part.local, words, place.dtype)
                _check_range(part.tensor, words, assembly.dtypes(part.local), place.dtype)
                with errors_named(place.file):
                    write_box(files[place.file], place, part.box, words)
                add_bytes(words.nbytes)
            for descriptor in files.values():
                start_syncing(descriptor)

    num_bytes = sum(place.num_bytes for place in places.values())
    in_order = _in_reading_order(parts.pieces, weights, assembly)
    shares = list(shares_of(in_order, size_of))
    run_tasks(write_share, shares, num_workers, lambda done: progress(done, num_bytes))


def _in_reading_order(parts: Iterable[Piece], weights: Weights, assembly: Assembly) -> list[Piece]:
    """Sort parts by their place in the source, so that those with columns of the same rows follow
    each other."""
    number = {name: i for i, name in enumerate(("", *weights.layout.shapes))}

    def key(part: Piece) -> tuple[int, Shape]:
        name, start = assembly.first_source(part.local)
        return number[name], start

    return sorted(parts, key=key)


def _check_range(tensor: str, words: Words, stored: Iterable[str], dtype: str) -> None:
    is_narrower = any(LARGEST[each] > LARGEST[dtype] for each in stored)
    if is_narrower and not np.isfinite(floats(words, dtype)).all():
        raise ValueError(
            f"{tensor} has values that {dtype} cannot hold: choose a --dtype with a larger range"
        )


def shares_of(parts: Iterable[Piece], size_of: Callable[[Piece], int]) -> Iterator[list[Piece]]:
    """The parts, in order, in shares of about `SHARE_BYTES`."""
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
