"""Copies weights from files to places in other files, part by part, with several processes."""

import ctypes
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import ExitStack
from itertools import chain
from math import isfinite, prod
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_convert.formats import errors_named
from checkpoint_convert.formats.safetensors_file import ITEM_SIZES, TensorPlace
from checkpoint_convert.formats.tensor_io import (
    NotFiniteError,
    read_box,
    start_syncing,
    write_box,
)
from checkpoint_convert.formats.torch_dtypes import DTYPE_NAMES, DTYPES, STORED_DTYPES
from checkpoint_convert.quantized.numbers import (
    block_maxima,
    packed,
    quantized,
    relative_scales,
    scales_of,
    whole_scale,
)
from checkpoint_convert.quantized.places import QuantizedPlace
from checkpoint_convert.weights import Progress, RowCache, ShardLoader, Weights, in_groups
from parallel import Box, Layout, Shape, ShardMapping

Advance = Callable[[int], None]
"""Called with the total number of bytes done so far."""
POLL_SECONDS = 0.2
SIGNALS = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM}
"""Signals that ask a process to end."""
_PR_SET_PDEATHSIG = 1  # of prctl(2)

# Set once in each worker process, which is forked for one call of `run_tasks`.
_task: Callable[[Any], Any]
_num_bytes: "Synchronized[int] | None" = None


def add_bytes(count: int) -> None:
    """Report from within a task that `count` more bytes are done."""
    if _num_bytes is not None:
        with _num_bytes.get_lock():
            _num_bytes.value += count


def run_tasks[Item, Result](
    task: Callable[[Item], Result],
    items: Sequence[Item],
    num_workers: int,
    progress: Advance = lambda num_bytes: None,
) -> list[Result]:
    """``[task(item) for item in items]`` over `num_workers` forked processes.

    Workers inherit `task` and everything it refers to in its current state, and die with the
    caller. The first failure is raised once all tasks that have begun have ended; if a worker is
    killed, ``BrokenProcessPool`` is raised.
    """
    context = get_context("fork")
    counter = context.Value("q", 0)
    num_workers = max(1, min(num_workers, len(items)))
    arguments = (task, counter, os.getpid())
    executor = ProcessPoolExecutor(num_workers, context, _start_worker, arguments)
    try:
        # Workers are forked with signals blocked until they have removed our handlers: Python's
        # code that runs after a fork drops exceptions of handlers, so a signal would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            futures = [executor.submit(_run, item) for item in items]
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        pending = set(futures)
        while pending:
            done, pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
            progress(counter.get_obj().value)  # without the lock: a killed worker may hold it
            for future in done:
                future.result()
    finally:
        executor.shutdown(cancel_futures=True)
    return [future.result() for future in futures]


def _start_worker(task: Callable[[Any], Any], num_bytes: "Synchronized[int]", parent: int) -> None:
    global _task, _num_bytes
    # Make Linux kill this process when its parent ends, even by SIGKILL.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)
    # Only the caller handles signals. In a worker its handlers would turn them into task failures,
    # and a worker that is terminated because another was killed would wait for its next task.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    _task, _num_bytes = task, num_bytes


def _run(item: Any) -> Any:
    return _task(item)


# A worker holds one part at a time, however large the tensors, plus the whole rows that contain its
# columns or, if dtypes differ, the source box. Small enough to stay in the CPU cache.
PART_BYTES = 4 << 20
# The amount of work that a worker takes at a time.
SHARE_BYTES = 64 << 20


def transfer(
    weights: Weights,
    layout: Layout,
    places: Mapping[str, TensorPlace],
    num_workers: int,
    progress: Progress,
) -> None:
    """Write every element of the tensors that `layout` describes to their `places`.

    The files must exist at their full size. Values are converted to the dtypes of the places, and
    quantised for a `QuantizedPlace`; if that has a `whole` scale, `write_whole_scales` must have
    run. Writing to disk is started; the caller waits for it.
    """
    dtypes = {name: _unquantized(place) for name, place in places.items()}
    parts = _parts(
        layout.shapes, places, PART_BYTES // max(ITEM_SIZES[dtype] for dtype in dtypes.values())
    )
    rows = RowCache(weights.tensors, weights.layout.shapes)
    loader = ShardLoader(rows, weights.layout, parts.compose(layout))

    def size_of(part: ShardMapping) -> int:
        return part.box.num_elements * ITEM_SIZES[dtypes[part.tensor]]

    def write_share(share: Sequence[ShardMapping]) -> None:
        # The first touch of memory costs more than a copy, so all parts reuse the same buffer.
        memory = torch.empty(PART_BYTES, dtype=torch.uint8)
        with ExitStack() as stack:
            files = {
                path: stack.enter_context(path.open("r+b", buffering=0)).fileno()
                for path in {file for part in share for file in _files_of(places[part.tensor])}
            }
            for part in share:
                values = memory[: size_of(part)].view(DTYPES[dtypes[part.tensor]])
                values = values.view(part.box.size)
                _fill(loader, part, values, weights)
                _check_range(part.tensor, values, loader.dtypes(part.local))
                for place, box, stored in _as_stored(part, places[part.tensor], values, files):
                    with errors_named(place.file):
                        write_box(files[place.file], place, box, stored)
                add_bytes(values.nbytes)
            for descriptor in files.values():
                start_syncing(descriptor)

    num_bytes = sum(map(size_of, parts.pieces))
    in_order = _in_reading_order(parts.pieces, weights, loader)
    shares = list(in_groups(in_order, size_of, SHARE_BYTES))
    run_tasks(write_share, shares, num_workers, lambda done: progress(done, num_bytes))


def write_whole_scales(
    weights: Weights,
    layout: Layout,
    places: Mapping[str, TensorPlace],
    fused: Mapping[str, Sequence[str]],
    num_workers: int,
    progress: Progress,
) -> int:
    """Write the scales of whole matrices, to which the scales of blocks are relative (NVFP4).

    Such a scale follows from the largest value of all matrices that engines fuse: `fused` lists
    them for each weight, itself included. So all values are read once before `transfer`
    quantises any. Returns the bytes read; `progress` counts them and `transfer`'s. Raises
    ValueError for a weight that is not finite.
    """
    scaled = {
        name: (place, place.whole)
        for name, place in places.items()
        if isinstance(place, QuantizedPlace) and place.whole is not None
    }
    num_bytes = num_bytes_of({name: place for name, (place, _) in scaled.items()})
    total = num_bytes + num_bytes_of(places)
    shapes = {name: place.shape for name, (place, _) in scaled.items()}
    parts = Layout.of_parts(shapes, PART_BYTES // max(ITEM_SIZES.values()))
    rows = RowCache(weights.tensors, weights.layout.shapes)
    loader = ShardLoader(rows, weights.layout, parts.compose(layout))

    def size_of(part: ShardMapping) -> int:
        return part.box.num_elements * ITEM_SIZES[_unquantized(places[part.tensor])]

    def maxima_of(share: Sequence[ShardMapping]) -> list[tuple[str, float]]:
        found = []
        for part in share:
            values = torch.empty(part.box.size, dtype=DTYPES[_unquantized(places[part.tensor])])
            _fill(loader, part, values, weights)
            found.append((part.tensor, float(values.abs().amax())))
            add_bytes(values.nbytes)
        return found

    in_order = _in_reading_order(parts.pieces, weights, loader)
    shares = list(in_groups(in_order, size_of, SHARE_BYTES))
    maxima: dict[str, float] = defaultdict(float)
    found = run_tasks(maxima_of, shares, num_workers, lambda done: progress(done, total))
    for name, maximum in chain.from_iterable(found):
        if not isfinite(maximum):
            raise ValueError(f"{name} has values that are not finite: it cannot be quantised")
        maxima[name] = max(maxima[name], maximum)
    for name, (_, place) in scaled.items():
        largest = torch.tensor(max(maxima[other] for other in fused[name]))
        with place.file.open("r+b", buffering=0) as file:
            write_box(file.fileno(), place, Box((0,), (1,)), whole_scale(largest))
    return num_bytes


def num_bytes_of(places: Mapping[str, TensorPlace]) -> int:
    """Bytes of all values before quantisation."""
    return sum(prod(place.shape) * ITEM_SIZES[_unquantized(place)] for place in places.values())


def _unquantized(place: TensorPlace) -> str:
    """Dtype of a tensor's values when read, before they are quantised."""
    return place.scheme.read_as if isinstance(place, QuantizedPlace) else place.dtype


def _files_of(place: TensorPlace) -> set[Path]:
    return place.files if isinstance(place, QuantizedPlace) else {place.file}


def _parts(
    shapes: Mapping[str, Shape], places: Mapping[str, TensorPlace], max_elements: int
) -> Layout:
    """`Layout.of_parts`, with quantised matrices cut at whole blocks, which are a row at most."""
    quantized = {n: place for n, place in places.items() if isinstance(place, QuantizedPlace)}
    whole = Layout.of_parts({n: s for n, s in shapes.items() if n not in quantized}, max_elements)
    pieces = [*whole.pieces]
    for name, place in quantized.items():
        for number, blocks in enumerate(_blocks(place, max_elements)):
            box = place.elements_of(blocks)
            pieces.append(ShardMapping(f"{name}[{number}]", Box.whole(box.size), name, box))
    return Layout({piece.local: piece.box.size for piece in pieces}, tuple(pieces))


def _blocks(place: QuantizedPlace, max_elements: int) -> list[Box]:
    return Box.whole(place.scale.shape).cut(max(1, max_elements // prod(place.block)))


def _as_stored(
    part: ShardMapping, place: TensorPlace, values: Tensor, files: Mapping[Path, int]
) -> Iterator[tuple[TensorPlace, Box, Tensor]]:
    """(place, box, values) to write for a part: one, or the scales and numbers of its blocks."""
    if not isinstance(place, QuantizedPlace):
        yield place, part.box, values
        return
    dtype, block = STORED_DTYPES[place.dtype], place.block
    maxima = block_maxima(values, block)
    if place.whole is None:
        stored = scales = scales_of(maxima, dtype)
    else:
        whole = torch.empty(1)
        read_box(files[place.whole.file], place.whole, Box((0,), (1,)), whole)
        stored = relative_scales(maxima, whole)
        scales = stored.float() / whole
    yield place.scale, place.blocks_of(part.box), stored
    numbers = packed(quantized(values, scales, dtype, block))
    yield place.numbers, place.stored_box(part.box), numbers


def _in_reading_order(
    parts: Iterable[ShardMapping], weights: Weights, loader: ShardLoader
) -> list[ShardMapping]:
    """Sort parts by their place in the source.

    Parts with columns of the same rows are then adjacent, and `RowCache` reads the rows once.
    """
    number = {name: i for i, name in enumerate(("", *weights.layout.shapes))}

    def key(part: ShardMapping) -> tuple[int, Shape]:
        name, start = loader.first_source(part.local)
        return number[name], start

    return sorted(parts, key=key)


def _fill(loader: ShardLoader, part: ShardMapping, values: Tensor, weights: Weights) -> None:
    """Read a part; errors of a checkpoint's values also name the Hugging Face tensor."""
    try:
        loader.fill(part.local, values)
    except NotFiniteError as error:
        # A checkpoint's key stacks layers: it does not say which one has the value.
        if weights.format != "torch_dist":
            raise
        raise ValueError(f"{part.tensor} has values that are not finite: {error}") from error


def _check_range(tensor: str, values: Tensor, stored: Iterable[str]) -> None:
    largest = torch.finfo(values.dtype).max
    is_narrower = any(torch.finfo(DTYPES[dtype]).max > largest for dtype in stored)
    # Sources are finite (`StoredTensors.check_finite`): infinity here comes from the conversion.
    if is_narrower and not values.isfinite().all():
        raise ValueError(
            f"{tensor} has values that {DTYPE_NAMES[values.dtype]} cannot hold: choose a --dtype "
            "with a larger range"
        )
