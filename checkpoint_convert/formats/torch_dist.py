"""Reads Megatron-Core's torch_dist checkpoints without Megatron-Core.

The format is that of torch.distributed.checkpoint. A tensor of the checkpoint, named by its key,
is cut into chunks: boxes, each saved by torch.save somewhere in a file `*.distcp`. The pickle
`.metadata` says which box is at which bytes of which file. Megatron-Core adds `common.pt`, a pickle
of everything that is not a tensor, which is never read here, and `metadata.json`, written last.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from checkpoint_convert.formats import METADATA_FILE
from checkpoint_convert.formats.safetensors_file import ITEM_SIZES, TensorPlace
from checkpoint_convert.formats.tensor_io import StoredTensors
from checkpoint_convert.formats.torch_dist_metadata import StoredChunk, StoredTensor, read_metadata
from checkpoint_convert.formats.torch_file import read_place
from checkpoint_convert.hf_config import read_json
from parallel import Box, Layout, Shape, ShardMapping

BACKENDS_FILE = "metadata.json"


@dataclass(frozen=True)
class StoredChunks:
    """The tensors of a checkpoint, as chunks in files."""

    shapes: Mapping[str, Shape]
    """Shape by key."""
    layout: Layout
    """Which boxes of which keys the chunks are. Not checked to cover the keys."""
    tensors: "ChunkTensors"
    """The values, by the chunk names of the layout."""
    objects: tuple[str, ...]
    """Keys of pickled objects and of 0-dimensional tensors, which are never read."""


class ChunkTensors(StoredTensors):
    """The chunks of a checkpoint as tensors, read box by box; each is located at its first read.

    A read raises ValueError when the stored tensor is not the one that the metadata describes, and
    FileNotFoundError, naming the file, when it is missing.
    """

    def __init__(self, folder: Path, chunks: Mapping[str, tuple[StoredChunk, str]]) -> None:
        self._found: dict[str, TensorPlace] = {}
        super().__init__(self._found)
        self.dtypes = {name: dtype for name, (_, dtype) in chunks.items()}
        self._folder, self._chunks = folder, chunks

    def check_files(self) -> None:
        """Raise ValueError that names all missing or truncated files, if there are any.

        Queries every file: meant for one process that reads them all, not for each of many ranks.
        """
        ends: dict[str, int] = {}
        for chunk, _ in self._chunks.values():
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.end)
        faults = []
        for file, end in ends.items():
            path = self._folder / file
            if not path.is_file():
                faults.append(f"{file} is not there")
            elif path.stat().st_size < end:
                faults.append(f"{file} {_cut_off(path.stat().st_size, end)}")
        if faults:
            raise ValueError(f"{self._folder} is not complete:\n  " + "\n  ".join(faults))

    def _place(self, name: str) -> TensorPlace:
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def _find(self, name: str) -> TensorPlace:
        chunk, dtype = self._chunks[name]
        path = self._folder / chunk.file
        descriptor = self._files.descriptor(path)
        num_bytes = os.fstat(descriptor).st_size
        if num_bytes < chunk.end:
            raise ValueError(f"{path} {_cut_off(num_bytes, chunk.end)}")
        place = read_place(descriptor, path, chunk.offset, chunk.length)
        if (place.shape, place.dtype) != (chunk.box.size, dtype):
            raise ValueError(
                f"{path} at byte {chunk.offset} holds {place.dtype} {list(place.shape)}, not "
                f"{name} as {dtype} {list(chunk.box.size)}"
            )
        return place


def read_chunks(folder: Path, keys: Callable[[str], bool] = lambda key: True) -> StoredChunks:
    """The tensors of a checkpoint whose keys `keys` accepts. Files of chunks are not opened yet.

    Raises ValueError for a checkpoint that is unfinished, has another format, names files outside
    the folder, or holds any of those tensors in an unsupported dtype.
    """
    for name in (METADATA_FILE, BACKENDS_FILE):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}: it is not a complete torch_dist checkpoint")
    backend = read_json(folder / BACKENDS_FILE).get("sharded_backend")
    if backend != "torch_dist":
        raise ValueError(f"{folder} is a checkpoint in the format {backend!r}, not 'torch_dist'")
    tensors, objects = read_metadata(folder / METADATA_FILE, keys)
    _check_dtypes(folder, tensors)
    chunks, pieces = {}, []
    for key, tensor in tensors.items():
        for chunk in tensor.chunks:
            name = chunk_name(key, chunk.box)
            chunks[name] = (chunk, tensor.dtype)
            pieces.append(ShardMapping(name, Box.whole(chunk.box.size), key, chunk.box))
    shapes = {name: chunk.box.size for name, (chunk, _) in chunks.items()}
    return StoredChunks(
        {key: tensor.shape for key, tensor in tensors.items()},
        Layout(shapes, tuple(pieces)),
        ChunkTensors(folder, chunks),
        objects,
    )


def _check_dtypes(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    faults = [
        f"{key} has dtype {tensor.dtype}, supported: {sorted(ITEM_SIZES)}"
        for key, tensor in tensors.items()
        if tensor.dtype not in ITEM_SIZES
    ]
    if faults:
        raise ValueError(f"{folder} cannot be read:\n  " + "\n  ".join(faults))


def _cut_off(num_bytes: int, end: int) -> str:
    return f"has {num_bytes} of {end} bytes: was it truncated?"


def chunk_name(key: str, box: Box) -> str:
    """Name of a chunk in layouts: its key and the start of its box."""
    return f"{key}@{'.'.join(map(str, box.start))}"
