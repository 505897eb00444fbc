"""Writing Megatron-Core's torch_dist checkpoints, without Megatron-Core. See `torch_dist`.

Files of the final size come first; then anybody writes the values to their places, in any order;
the metadata come last and make it a checkpoint.
"""

import io
import json
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import get_crc32_options, set_crc32_options, skip_data

from checkpoint_convert.safetensors_file import TensorPlace
from checkpoint_convert.torch_dist import BACKENDS_FILE, METADATA_FILE, chunk_name
from checkpoint_convert.torch_file import read_place
from checkpoint_convert.workers import run_tasks
from parallel import Box, Layout, Piece, Shape, cover_exactly

_COMMON_FILE = "common.pt"
_BACKEND_VERSIONS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor to be written. Any cut of a tensor into boxes can be loaded."""

    key: str
    box: Box
    shape: Shape
    """Of the whole tensor."""
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The name that `read_chunks` will give it."""
        return chunk_name(self.key, self.box)

    @property
    def num_bytes(self) -> int:
        """Size of its values."""
        return self.box.num_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CreatedChunk:
    """A chunk in a file, without its values."""

    chunk: Chunk
    file: str
    offset: int
    length: int
    """What torch.save has written: `length` bytes of `file` from `offset` on."""
    place: TensorPlace
    """Where the values belong."""


def create_chunks(
    folder: Path, files: Sequence[Sequence[Chunk]], num_workers: int = 1
) -> list[CreatedChunk]:
    """Write files of the final size that hold `files`' chunks, in order, but for their values.

    They take no disk space until the values are written.
    """
    created = run_tasks(
        lambda number: _create_file(folder / f"__{number}_0.distcp", files[number]),
        range(len(files)),
        num_workers,
    )
    return list(chain.from_iterable(created))


def _create_file(path: Path, chunks: Sequence[Chunk]) -> list[CreatedChunk]:
    created = []
    with path.open("w+b") as file, _without_values():
        for chunk in chunks:
            offset = file.tell()
            torch.save(torch.empty(chunk.box.size, dtype=chunk.dtype), file)
            length = file.tell() - offset
            file.flush()
            place = read_place(file.fileno(), path, offset, length)
            created.append(CreatedChunk(chunk, path.name, offset, length, place))
    return created


def finish_checkpoint(
    folder: Path, created: Sequence[CreatedChunk], empty_objects: Sequence[str] = ()
) -> None:
    """Make files whose values have been written a checkpoint; one process calls this, last.

    `empty_objects` are entries that Megatron-Core asks for and that hold nothing, such as
    ``decoder.layers.mlp.linear_fc1._extra_state/shard_0_2``, of layer 0 of 2.
    """
    chunks = [each.chunk for each in created]
    pieces = tuple(Piece(c.name, Box.whole(c.box.size), c.key, c.box) for c in chunks)
    cover_exactly({c.key: c.shape for c in chunks}, [Layout({}, pieces)])
    tensors = {
        c.key: TensorStorageMetadata(TensorProperties(c.dtype), torch.Size(c.shape), chunks=[])
        for c in chunks
    }
    places = {}
    for each in created:
        start, size = torch.Size(each.chunk.box.start), torch.Size(each.chunk.box.size)
        tensors[each.chunk.key].chunks.append(ChunkStorageMetadata(start, size))
        info = _StorageInfo(each.file, each.offset, each.length)
        places[MetadataIndex(each.chunk.key, start)] = info
    if empty_objects:  # all are stored once
        nothing, name = _saved([None]), "__empty_0.distcp"
        _write(folder / name, nothing)
        places |= {MetadataIndex(o): _StorageInfo(name, 0, len(nothing)) for o in empty_objects}
    metadata = Metadata(
        {**tensors, **{name: BytesStorageMetadata() for name in empty_objects}},
        storage_data=places,
        version=CURRENT_DCP_VERSION,
    )
    _write(folder / METADATA_FILE, pickle.dumps(metadata))
    _write(folder / _COMMON_FILE, _saved({}))
    _write(folder / BACKENDS_FILE, json.dumps(_BACKEND_VERSIONS).encode())


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:  # buffered: an unbuffered file may write a part and say so only
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _without_values() -> Iterator[None]:
    """Let torch.save leave room for values, and say no checksums of them, which nobody reads."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        with skip_data():
            yield
    finally:
        set_crc32_options(before)
