"""Exports weights from the ranks into a Hugging Face folder, without gathering them anywhere.

One process creates files of the final size; then every rank writes the boxes that it owns at their
offsets; finally one process gives the folder its name.
"""

import os
import shutil
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_convert.formats import errors_named
from checkpoint_convert.formats.safetensors_file import STORED_SIZES, TensorPlace
from checkpoint_convert.formats.tensor_io import whole_rows, write_box
from checkpoint_convert.formats.torch_dtypes import DTYPE_NAMES, DTYPES, STORED_DTYPES
from checkpoint_convert.hf_folder import locate_tensors
from checkpoint_convert.megatron import hf_dtypes, hf_tensors
from checkpoint_convert.megatron_to_hf import MAX_SHARD_BYTES, create_folder
from checkpoint_convert.mtp import open_mtp_layers
from checkpoint_convert.new_folder import sync, sync_tree
from checkpoint_convert.quantized.model import QuantizedModel
from checkpoint_convert.shape import ModelShape
from checkpoint_convert.weights import as_laid_out
from parallel import Box, Copy, Layout, intersect
from parallel.views import as_local, as_whole

MIN_SHARD_BYTES = 10**9
"""Lower limit at any number of ranks, so that a model of a few GB is not split into tiny files."""


def create_export(
    folder: Path,
    source_folder: Path,
    shape: ModelShape,
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    quantized: QuantizedModel | None = None,
) -> None:
    """Create a Hugging Face folder whose weights are zeros of `dtype`; one process calls this.

    Everything but the weights is copied from `source_folder`, with the dtype in config.json
    adjusted. Weights that are `quantized` have 8 or 4 bits, and scales. `folder` is empty or does
    not exist yet. A weight file exceeds `max_shard_bytes` only when a single tensor does. Raises
    ValueError when the disk is too full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dtypes = hf_dtypes(shape, DTYPE_NAMES[dtype], "F32")
    create_folder(folder, source_folder, shape, dtypes, max_shard_bytes, quantized)


def shard_bytes_for(num_writers: int, shape: ModelShape, dtype: torch.dtype) -> int:
    """The `max_shard_bytes`, within 1 to 5 GB, that makes about one file per writing rank."""
    num_bytes = dtype.itemsize * sum(map(prod, hf_tensors(shape).values()))
    return min(max(-(-num_bytes // num_writers), MIN_SHARD_BYTES), MAX_SHARD_BYTES)


def write_weights(
    folder: Path,
    layout: Layout,
    parameters: Mapping[str, Tensor],
    first_file: int = 0,
    files: Layout | None = None,
) -> int:
    """Write the part of `parameters` (local tensors of `layout`) that this rank owns to an export.

    Every rank calls this after `create_export`, concurrently or not, any number of times. On
    return the data is on disk. Values are converted to the dtype of the export.

    Ranks that write to the same file at the same time wait for each other. So that they start with
    different files, a rank cycles through its files from number `first_file` on. `files` is the
    `file_layout` of the model; None: no tensor of the files is a stack.

    Returns the number of elements written; the sum over all ranks is that of the model.
    """
    layout.check_shapes({name: tuple(tensor.shape) for name, tensor in parameters.items()})
    names = {piece.tensor for piece in layout.pieces if not piece.is_replica}
    if files is None:
        places = locate_tensors(folder, names)
        files = Layout.of_whole_tensors({name: place.shape for name, place in places.items()})
    else:
        stored = {piece.local for piece in files.pieces if piece.tensor in names}
        places = as_laid_out(locate_tensors(folder, stored), files)
    copies = intersect(layout, files)
    owned = sum(piece.box.num_elements for piece in layout.pieces if not piece.is_replica)
    written = sum(copy.source_box.num_elements for copy in copies)
    assert written == owned, f"{folder} has room for {written} of {owned} elements of this rank"
    by_file: dict[Path, list[Copy]] = defaultdict(list)
    for copy in copies:
        by_file[places[copy.destination].file].append(copy)
    in_turn = deque(by_file.items())
    in_turn.rotate(-first_file)
    for file, file_copies in in_turn:
        with errors_named(file), file.open("r+b", buffering=0) as opened:
            for box, together in _by_rows(file_copies, places):
                place = places[together[0].destination]
                values = _assembled(parameters, together, box, STORED_DTYPES[place.dtype])
                write_box(opened.fileno(), place, box, values)
            os.fsync(opened)
    return written


def write_mtp_layers(
    folder: Path, source_folder: Path, shape: ModelShape, rank: int, num_ranks: int
) -> None:
    """Write this rank's share of the source's multi-token-prediction layers to an export.

    Every rank calls this after `create_export`. A rank holds one tensor at a time.
    """
    with closing(open_mtp_layers(source_folder, shape, folder)) as weights:
        sizes, dtypes = weights.layout.shapes, weights.tensors.dtypes
        names = sorted(sizes)  # sorted: a rank's share lies in few files
        for name in names[rank * len(names) // num_ranks : (rank + 1) * len(names) // num_ranks]:
            values = torch.empty(sizes[name], dtype=DTYPES[dtypes[name]])
            weights.tensors.read_into(name, Box.whole(sizes[name]), values)
            write_weights(folder, Layout.of_whole_tensors({name: sizes[name]}), {name: values})


def _by_rows(
    copies: Sequence[Copy], places: Mapping[str, TensorPlace]
) -> Iterator[tuple[Box, list[Copy]]]:
    """Group copies into boxes to write: whole rows, if they are short and the copies fill them.

    So gate and up whose elements alternate are written together, not element by element.
    """
    groups: dict[tuple[str, Box], list[Copy]] = defaultdict(list)
    for copy in copies:
        place, box = places[copy.destination], copy.destination_box
        rows = whole_rows(place.shape, box, STORED_SIZES[place.dtype])
        groups[copy.destination, rows].append(copy)
    for (_, rows), together in groups.items():
        if sum(copy.destination_box.num_elements for copy in together) == rows.num_elements:
            yield rows, together
        else:
            yield from ((copy.destination_box, [copy]) for copy in together)


def _assembled(
    parameters: Mapping[str, Tensor], copies: Sequence[Copy], box: Box, dtype: torch.dtype
) -> Tensor:
    """Gather the values of a box from its `copies`, on the CPU."""
    parts = []
    for copy in copies:
        values = parameters[copy.source].detach()[copy.source_box.slices]
        values = as_whole(values, copy.source_axes)
        parts.append(as_local(values, copy.destination_axes, len(box.size)).to("cpu", dtype))
    if len(parts) == 1:
        return parts[0]
    whole = torch.empty(box.size, dtype=dtype)
    for copy, part in zip(copies, parts, strict=True):
        whole[copy.destination_box.moved(box.start, (0,) * len(box.start)).slices] = part
    return whole


def finish_export(partial: Path, folder: Path) -> None:
    """Give a fully written export its final name; one process calls this, after all have written.

    An earlier export of that name is replaced once the new one is on disk. Both paths must be on
    the same file system.
    """
    replaced = folder.with_name(folder.name + ".replaced")
    # Left by a run that died in this function. Without `folder` it is the only complete export.
    if replaced.exists() and folder.exists():
        shutil.rmtree(replaced)
    # Before the rename: after a power loss, a folder with the final name must be complete.
    sync_tree(partial)
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    sync(folder.parent)
    if replaced.exists():
        shutil.rmtree(replaced)
