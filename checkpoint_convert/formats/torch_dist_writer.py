"""Writes Megatron-Core's torch_dist checkpoints without Megatron-Core. See `torch_dist`.

Files of the final size are created first; then any process writes values to their places, in any
order; the metadata is written last and makes the folder a checkpoint.
"""

import io
import json
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Size
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpoint_convert.formats import METADATA_FILE
from checkpoint_convert.formats.safetensors_file import ITEM_SIZES, TensorPlace
from checkpoint_convert.formats.torch_dist import BACKENDS_FILE, chunk_name
from checkpoint_convert.formats.torch_dtypes import DTYPES
from checkpoint_convert.formats.torch_file import saved_tensor
from parallel import Box, Layout, Shape, ShardMapping, cover_exactly

_COMMON_FILE = "common.pt"
_EMPTY_FILE = "__empty_0.distcp"
_BACKEND_VERSIONS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor to be written. A tensor may be cut into any boxes that cover it exactly."""

    key: str
    box: Box
    shape: Shape
    """Shape of the whole tensor."""
    dtype: str

    @property
    def name(self) -> str:
        """The name that `read_chunks` gives the chunk."""
        return chunk_name(self.key, self.box)

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * ITEM_SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class CreatedChunk:
    """A chunk in a file, without its values."""

    chunk: Chunk
    file: str
    offset: int
    length: int
    """The output of torch.save is `length` bytes of `file` from `offset` on."""
    place: TensorPlace
    """Where the values go."""


def create_chunks(folder: Path, files: Sequence[Sequence[Chunk]]) -> list[CreatedChunk]:
    """Create files of the final size that hold the chunks of `files`, in order, without values."""
    created = []
    for number, chunks in enumerate(files):
        path = folder / file_name(number)
        created += place_chunks(path, chunks)
        with path.open("wb") as file:
            for chunk in chunks:
                saved = saved_tensor(chunk.box.size, chunk.dtype)
                file.write(saved.head)
                # A hole: it takes no disk space until values are written.
                file.seek(saved.num_bytes, os.SEEK_CUR)
                file.write(saved.tail)
    return created


def file_name(number: int) -> str:
    """Name of chunk file `number`; Megatron-Core writes one file per rank."""
    return f"__{number}_0.distcp"


def place_chunks(path: Path, chunks: Sequence[Chunk]) -> list[CreatedChunk]:
    """Where the chunks of one file will be, in order. Writes nothing; see `file_parts`."""
    created, offset = [], 0
    for chunk in chunks:
        saved = saved_tensor(chunk.box.size, chunk.dtype)
        start = offset + len(saved.head)
        place = TensorPlace(path, chunk.dtype, chunk.box.size, start, saved.num_bytes)
        created.append(CreatedChunk(chunk, path.name, offset, saved.length, place))
        offset += saved.length
    return created


def file_parts(chunks: Sequence[Chunk], values: Sequence[memoryview]) -> Iterator[memoryview]:
    """The bytes of a file of chunks with these values, in order."""
    for chunk, bytes_of_chunk in zip(chunks, values, strict=True):
        saved = saved_tensor(chunk.box.size, chunk.dtype)
        assert len(bytes_of_chunk) == saved.num_bytes
        yield from (memoryview(saved.head), bytes_of_chunk, memoryview(saved.tail))


def index_of(created: Sequence[CreatedChunk], empty_objects: Sequence[str] = ()) -> bytes:
    """The content of `.metadata`: the file and offset of each chunk; equal for equal chunks.

    `empty_objects` are entries that Megatron-Core requires but that hold nothing, such as
    ``decoder.layers.mlp.linear_fc1._extra_state/shard_0_2`` (layer 0 of 2). Raises ValueError
    unless the chunks cover each tensor exactly.
    """
    chunks = [each.chunk for each in created]
    pieces = tuple(ShardMapping(c.name, Box.whole(c.box.size), c.key, c.box) for c in chunks)
    cover_exactly({c.key: c.shape for c in chunks}, [Layout({}, pieces)])
    return pickle.dumps(_metadata(created, empty_objects))


def finish_checkpoint(folder: Path, index: bytes) -> None:
    """Turn a folder of fully written files into a checkpoint; one process calls this, last."""
    (folder / _EMPTY_FILE).write_bytes(_saved([None]))  # all empty objects are stored once
    (folder / METADATA_FILE).write_bytes(index)
    (folder / _COMMON_FILE).write_bytes(_saved({}))
    # Last, as in Megatron-Core's `save`: a folder without metadata.json is not a checkpoint.
    (folder / BACKENDS_FILE).write_text(json.dumps(_BACKEND_VERSIONS), encoding="utf-8")


def _metadata(created: Sequence[CreatedChunk], empty_objects: Sequence[str]) -> Metadata:
    tensors: dict[str, TensorStorageMetadata] = {}
    places = {}
    for each in created:
        chunk, start, size = each.chunk, Size(each.chunk.box.start), Size(each.chunk.box.size)
        if chunk.key not in tensors:
            properties = TensorProperties(DTYPES[chunk.dtype])
            tensors[chunk.key] = TensorStorageMetadata(properties, Size(chunk.shape), [])
        tensors[chunk.key].chunks.append(ChunkStorageMetadata(start, size))
        places[MetadataIndex(chunk.key, start)] = _StorageInfo(each.file, each.offset, each.length)
    nothing = _StorageInfo(_EMPTY_FILE, 0, len(_saved([None])))
    return Metadata(
        tensors | dict.fromkeys(empty_objects, BytesStorageMetadata()),
        storage_data=places | {MetadataIndex(name): nothing for name in empty_objects},
        version=CURRENT_DCP_VERSION,
    )


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
