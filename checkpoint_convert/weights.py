"""A model's weights in files of any format: which boxes they hold, and how tensors are read.

A conversion assembles one tensor at a time from boxes of source tensors.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_convert.families.decoder import MTP_LAYER
from checkpoint_convert.families.vision import VISION
from checkpoint_convert.formats import is_torch_dist
from checkpoint_convert.formats.safetensors_file import TensorPlace
from checkpoint_convert.formats.tensor_io import StoredTensors, TensorSource, whole_rows
from checkpoint_convert.formats.torch_dist import read_chunks
from checkpoint_convert.formats.torch_dtypes import DTYPES, STORED_DTYPES
from checkpoint_convert.hf_config import read_shape
from checkpoint_convert.hf_folder import check_weights, locate_tensors
from checkpoint_convert.megatron import (
    checkpoint_layout,
    file_layout,
    file_tensors,
    hf_tensors,
)
from checkpoint_convert.quantized.numbers import DequantizedTensors
from checkpoint_convert.shape import ModelShape
from parallel import (
    Axes,
    Box,
    Copy,
    Layout,
    Shape,
    cover_exactly,
    intersect,
)
from parallel.views import as_whole

_EMBEDDING = "embedding.word_embeddings.weight"
_WEIGHT_PREFIXES = ("embedding.", "decoder.", "output_layer.", VISION)
"""Prefixes of the keys of weights; other keys are of the optimizer's or the trainer's state."""
_TENSOR_SIZES = range(1, 65)
"""Tensor parallel sizes that may have padded the vocabulary of a checkpoint."""

Progress = Callable[[int, int], None]
"""Called from time to time with (bytes done, total bytes)."""


@dataclass(frozen=True)
class Weights:
    """A set of weights: all of a model, or the tensors that were requested."""

    shape: ModelShape
    layout: Layout
    """Maps the stored tensors to boxes of the Hugging Face tensors."""
    tensors: StoredTensors
    format: str
    """``safetensors``, ``bin`` or ``torch_dist``."""

    @property
    def dtypes(self) -> dict[str, str]:
        """Dtype of every Hugging Face tensor; all its boxes are stored in the same dtype."""
        return {piece.tensor: self.tensors.dtypes[piece.local] for piece in self.layout.pieces}

    def close(self) -> None:
        self.tensors.close()


def open_weights(path: Path, shape: ModelShape, names: Collection[str] | None = None) -> Weights:
    """Open the weights of a model of `shape`: a Hugging Face folder (safetensors or `.bin`) or a
    Megatron torch_dist checkpoint.

    Reads only headers, except for a tied model that also stores its head: then both tables are
    compared. Raises ValueError that lists all faults unless exactly the tensors of the model are
    there, each once and with its shape. `names` limits what is opened and checked in a Hugging Face
    folder to those tensors. Quantised weights are read as if they were stored in the dtype that
    config.json names.
    """
    if is_torch_dist(path):
        return _open_torch_dist(path, shape)
    layout, stored = file_layout(shape), None
    if names is not None:
        wanted = {*names}
        pieces = tuple(piece for piece in layout.pieces if piece.tensor in wanted)
        layout = Layout({p.local: layout.shapes[p.local] for p in pieces}, pieces)
        stored = layout.shapes
    places = as_laid_out(check_weights(path, shape, stored), layout)
    formats = {place.file.suffix.lstrip(".") for place in places.values()}
    return Weights(shape, layout, DequantizedTensors(places), " and ".join(sorted(formats)))


def as_laid_out(places: Mapping[str, TensorPlace], layout: Layout) -> dict[str, TensorPlace]:
    """Give the places of stored tensors the dimensions that they have in `layout` (stacks)."""
    return {name: replace(place, shape=layout.shapes[name]) for name, place in places.items()}


def whole_tensors(folder: Path, *, of_mtp: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Name and values of every tensor of a Hugging Face folder, dequantised, one at a time: of the
    model, or `of_mtp` of its layer for multi-token prediction, without copies of the model's."""
    shape, names = read_shape(folder), None
    if of_mtp:
        others, shape = hf_tensors(shape), replace(shape, trains_mtp=True)
        names = hf_tensors(shape).keys() - others.keys()
    with closing(open_weights(folder, shape, names)) as weights:
        stored = file_tensors(shape)
        for name, size in weights.layout.shapes.items():
            values = torch.empty(size, dtype=DTYPES[weights.tensors.dtypes[name]])
            weights.tensors.read_into(name, Box.whole(size), values)
            yield name, values.view(stored[name])


def _open_torch_dist(path: Path, shape: ModelShape) -> Weights:
    layer = _trained_mtp_keys(path, shape)
    stored = read_chunks(path, keys=lambda key: key.startswith(_WEIGHT_PREFIXES) or key in layer)
    stored.tensors.check_files()
    if _EMBEDDING not in stored.shapes:
        found = [*read_chunks(path).shapes, "nothing"][:3]
        raise ValueError(
            f"{path} is not a checkpoint of a Megatron-Core GPTModel: it has no {_EMBEDDING}, but "
            f"{', '.join(found)} ..."
        )
    vision = tuple((key, size) for key, size in stored.shapes.items() if key.startswith(VISION))
    # config.json does not say what was trained; the checkpoint's keys do.
    shape = replace(shape, trains_mtp=bool(layer), vision=vision)
    wanted = checkpoint_layout(shape, _padded_vocab(path, shape, stored.shapes[_EMBEDDING][0]))
    faults = [
        f"{key} {list(size)} is missing"
        for key, size in wanted.shapes.items()
        if key not in stored.shapes
    ]
    for key, size in stored.shapes.items():
        if key not in wanted.shapes:
            faults.append(f"{key} {list(size)} is not part of the model")
        elif size != wanted.shapes[key]:
            faults.append(
                f"{key} has shape {list(size)}, the config requires {list(wanted.shapes[key])}"
            )
    if faults:
        raise ValueError(
            f"{path} is not a checkpoint of the {shape.family} model that its config describes:\n  "
            + "\n  ".join(faults)
        )
    try:
        cover_exactly(wanted.shapes, [stored.layout])
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return Weights(shape, stored.layout.compose(wanted), stored.tensors, "torch_dist")


def _padded_vocab(path: Path, shape: ModelShape, num_rows: int) -> int:
    """Rows of the stored embedding; ValueError unless it is the vocabulary padded for some mesh."""
    # We pad to a multiple of the tensor parallel size, Megatron-LM to a multiple of 128 times the
    # size.
    units = [*_TENSOR_SIZES, *(128 * size for size in _TENSOR_SIZES)]
    possible = {-(-shape.vocab_size // unit) * unit for unit in units}
    if num_rows > shape.vocab_size and num_rows not in possible:
        raise ValueError(
            f"{path} has an embedding of {num_rows:,} rows, but the config says vocab_size "
            f"{shape.vocab_size:,}, which no mesh pads to that: were tokens added?"
        )
    # Fewer rows than the vocabulary are then reported as a wrong shape, with all other faults.
    return max(num_rows, shape.vocab_size)


def _trained_mtp_keys(path: Path, shape: ModelShape) -> Collection[str]:
    """Keys of the trained MTP layer; none unless the checkpoint has all of them."""
    if not shape.can_train_mtp:
        return ()
    layout = checkpoint_layout(replace(shape, trains_mtp=True), shape.vocab_size)
    keys = {key for key in layout.shapes if key.startswith(MTP_LAYER)}
    # Layers that Megatron-LM trained may have other keys, and are left out.
    return keys if keys <= read_chunks(path, keys=keys.__contains__).shapes.keys() else ()


def in_groups[Item](
    items: Iterable[Item], size_of: Callable[[Item], int], max_size: int
) -> Iterator[list[Item]]:
    """The items, in order, in groups of at most `max_size`, or of one larger item."""
    group: list[Item] = []
    room = max_size
    for item in items:
        if group and size_of(item) > room:
            yield group
            group, room = [], max_size
        group.append(item)
        room -= size_of(item)
    if group:
        yield group


class ShardLoader:
    """Builds the local tensors of a layout from tensors in files; reads only the boxes it needs."""

    def __init__(self, source: TensorSource, stored: Layout, layout: Layout) -> None:
        layout.check_complete()
        self._source = source
        self._copies: dict[str, list[Copy]] = defaultdict(list)
        for copy in intersect(stored, layout):
            self._copies[copy.destination].append(copy)
        self._zeros: dict[str, list[Box]] = defaultdict(list)
        for name, box in layout.zeros:
            self._zeros[name].append(box)

    def dtypes(self, name: str) -> set[str]:
        """Stored dtypes of the source values that make up the local tensor `name`."""
        return {self._source.dtypes[copy.source] for copy in self._copies[name]}

    def num_elements(self, name: str) -> int:
        """Number of elements of the local tensor `name` that the source holds."""
        return sum(copy.destination_box.num_elements for copy in self._copies[name])

    def first_source(self, name: str) -> tuple[str, Shape]:
        """Where the local tensor `name` begins in the source: a tensor name and an index."""
        if not self._copies[name]:  # only zeros
            return "", ()
        first = self._copies[name][0]
        return first.source, first.source_box.start

    def fill(self, name: str, target: Tensor) -> None:
        """Write every element of the local tensor `name` into `target`, converted to its dtype."""
        target = target.detach()
        for copy in self._copies[name]:
            part = target[copy.destination_box.slices]
            dtype = STORED_DTYPES[self._source.dtypes[copy.source]]
            # Read in place: without transposition, shapes differ only by dimensions of size 1.
            if dtype == part.dtype and _are_in_order(copy.source_axes, copy.destination_axes):
                part = part.view(copy.source_box.size)
                self._source.read_into(copy.source, copy.source_box, part)
            else:
                stored = torch.empty(copy.source_box.size, dtype=dtype)
                self._source.read_into(copy.source, copy.source_box, stored)
                whole = as_whole(stored, copy.source_axes)
                as_whole(part, copy.destination_axes).copy_(whole)
        for box in self._zeros[name]:
            target[box.slices] = 0


def _are_in_order(*axes: Axes) -> bool:
    return all([*each] == sorted(each) for each in axes)


# Largest rows to keep. Of larger ones, only the columns are read.
_MAX_BYTES = 64 << 20


class RowCache:
    """Reads whole rows, and keeps them for further boxes of their columns."""

    def __init__(self, source: TensorSource, shapes: Mapping[str, Shape]) -> None:
        self.dtypes = source.dtypes
        self._source, self._shapes = source, shapes
        # Grows, and is reused: the first touch of new memory costs more than a copy.
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._kept: tuple[str, Box] | None = None
        self._rows: Tensor

    def read_into(self, name: str, box: Box, target: Tensor) -> None:
        """See `TensorSource`; reads the file only if the kept rows do not include `box`."""
        shape = self._shapes[name]
        # A box of columns is a small run in every row: 8 tensor ranks would read each row in 8
        # runs.
        rows = Box((*box.start[:-1], 0), (*box.size[:-1], shape[-1]))
        rows = whole_rows(shape, rows, target.itemsize)
        num_bytes = rows.num_elements * target.itemsize
        if rows == box or num_bytes > _MAX_BYTES:
            self._source.read_into(name, box, target)
            return
        if self._kept != (name, rows):
            self._kept = None  # until the read succeeds: it overwrites the kept rows
            if num_bytes > len(self._memory):
                self._memory = torch.empty(num_bytes, dtype=torch.uint8)
            self._rows = self._memory[:num_bytes].view(target.dtype).view(rows.size)
            self._source.read_into(name, rows, self._rows)
            self._kept = (name, rows)
        target.copy_(self._rows[box.moved(rows.start, (0,) * len(rows.start)).slices])


def read_weights(
    path: Path,
    shape: ModelShape,
    layout: Layout,
    parameters: Mapping[str, Tensor],
    progress: Progress = lambda done, total: None,
) -> None:
    """Fill every element of a rank's `parameters`, the local tensors of `layout`, in place.

    Values are converted to the dtype and device of each parameter. Raises ValueError, like
    `open_weights`, when the files at `path` do not hold the requested tensors.
    """
    # Only files with these are opened: otherwise a job of a thousand ranks would read the header of
    # every file a thousand times.
    names = {piece.tensor for piece in layout.pieces}
    with closing(open_weights(path, shape, names)) as weights:
        _fill(parameters, weights.tensors, weights.layout, layout, progress)


def read_stored(folder: Path, layout: Layout, parameters: Mapping[str, Tensor]) -> None:
    """Fill `parameters` like `read_weights`, with the 8-bit weights of a quantised folder as they
    are; `layout` maps their scales, too."""
    places = locate_tensors(folder, {piece.tensor for piece in layout.pieces})
    stored = Layout.of_whole_tensors({name: place.shape for name, place in places.items()})
    with closing(StoredTensors(places)) as tensors:
        tensors.must_be_finite = False  # torch compares no numbers of 8 bits
        _fill(parameters, tensors, stored, layout)


def _fill(
    parameters: Mapping[str, Tensor],
    source: TensorSource,
    stored: Layout,
    layout: Layout,
    progress: Progress = lambda done, total: None,
) -> None:
    layout.check_shapes({name: tuple(tensor.shape) for name, tensor in parameters.items()})
    done, num_bytes = 0, sum(parameter.nbytes for parameter in parameters.values())
    loader = ShardLoader(source, stored, layout)
    for name, parameter in parameters.items():
        progress(done, num_bytes)
        done += parameter.nbytes
        values = parameter.detach()
        staged = values if values.is_cpu else torch.empty_like(values, device="cpu")
        loader.fill(name, staged)
        values.copy_(staged)  # a no-op when both are the same tensor
