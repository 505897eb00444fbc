"""Reads Megatron-Core's torch_dist checkpoints without Megatron-Core.

The format is that of torch.distributed.checkpoint. A tensor of the checkpoint, named by its key, is
cut into chunks: boxes, each saved by torch.save somewhere in a file `*.distcp`. The pickle
`.metadata` says which box is at which bytes of which file. Megatron-Core adds `common.pt`, a pickle
of everything that is not a tensor, which is never read here, and `metadata.json`, written last.

torch and Megatron-Core load `.metadata` without restriction. Here an inert class stands for every
class of theirs that it names, and everything else is refused.
"""

import io
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from checkpoint_convert.folder import read_json
from checkpoint_convert.formats import METADATA_FILE, errors_named
from checkpoint_convert.formats.safetensors_file import ITEM_SIZES, NAMES, TensorPlace
from checkpoint_convert.formats.tensor_io import StoredTensors
from checkpoint_convert.formats.torch_file import read_place
from parallel import Box, Layout, Shape, ShardMapping

BACKENDS_FILE = "metadata.json"


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a tensor, saved by torch.save into `length` bytes of `file` from `offset` on."""

    key: str
    box: Box
    dtype: str
    """By safetensors' name, or by torch's if unsupported."""
    file: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """Number of bytes that `file` must have."""
        return self.offset + self.length


@dataclass(frozen=True)
class StoredChunks:
    """The tensors of a checkpoint, as chunks in files."""

    shapes: Mapping[str, Shape]
    """Shape by key."""
    layout: Layout
    """Maps the chunks to boxes of the keys; not checked to cover them."""
    tensors: "ChunkTensors"
    """The values, by the chunk names of the layout."""


class ChunkTensors(StoredTensors):
    """The chunks of a checkpoint as tensors, read box by box; each is located at its first read.

    A read raises ValueError when the stored tensor is not the one that the metadata describes, and
    FileNotFoundError, naming the file, when it is missing.
    """

    def __init__(self, folder: Path, chunks: Mapping[str, StoredChunk]) -> None:
        self._found: dict[str, TensorPlace] = {}
        # Empty at first: `_place` finds a chunk at its first read.
        super().__init__(self._found)
        self.dtypes = {name: chunk.dtype for name, chunk in chunks.items()}
        self._folder, self._chunks = folder, chunks

    def check_files(self) -> None:
        """Raise ValueError that names all missing or truncated files, if there are any.

        Queries every file: meant for one process that reads them all, not for each of many ranks.
        """
        ends: dict[str, int] = {}
        for chunk in self._chunks.values():
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
        chunk = self._chunks[name]
        path = self._folder / chunk.file
        descriptor = self._descriptor(path)
        num_bytes = os.fstat(descriptor).st_size
        if num_bytes < chunk.end:
            raise ValueError(f"{path} {_cut_off(num_bytes, chunk.end)}")
        place = read_place(descriptor, path, chunk.offset, chunk.length)
        if (place.shape, place.dtype) != (chunk.box.size, chunk.dtype):
            raise ValueError(
                f"{path} at byte {chunk.offset} holds {place.dtype} {list(place.shape)}, not "
                f"{name} as {chunk.dtype} {list(chunk.box.size)}"
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
    shapes = {}
    stored: list[StoredChunk] = []
    with _malformed_named(folder / METADATA_FILE):
        fields = _load(folder / METADATA_FILE)
        places = {
            (index.state["fqn"], index.state.get("offset")): info.state
            for index, info in fields["storage_data"].items()
        }
        for key, entry in fields["state_dict_metadata"].items():
            if _has_dimensions(entry) and keys(key):
                shapes[key] = _whole_numbers(entry.state["size"])
                stored += _chunks_of(key, entry.state, places)
    _check_dtypes(folder, stored)
    chunks = {chunk_name(chunk.key, chunk.box): chunk for chunk in stored}
    layout = Layout(
        {name: chunk.box.size for name, chunk in chunks.items()},
        tuple(ShardMapping(n, Box.whole(c.box.size), c.key, c.box) for n, c in chunks.items()),
    )
    return StoredChunks(shapes, layout, ChunkTensors(folder, chunks))


def _check_dtypes(folder: Path, chunks: list[StoredChunk]) -> None:
    unsupported = {chunk.key: chunk.dtype for chunk in chunks if chunk.dtype not in ITEM_SIZES}
    if unsupported:
        raise ValueError(
            f"{folder} cannot be read:"
            + "".join(
                f"\n  {key} has dtype {dtype}, supported: {sorted(ITEM_SIZES)}"
                for key, dtype in unsupported.items()
            )
        )


def _cut_off(num_bytes: int, end: int) -> str:
    return f"has {num_bytes} of {end} bytes: was it truncated?"


def chunk_name(key: str, box: Box) -> str:
    """Name of a chunk in layouts: its key and the start of its box."""
    return f"{key}@{'.'.join(map(str, box.start))}"


def read_object_places(path: Path) -> list[tuple[str, int, int]]:
    """File, offset and length of every entry that is a pickled object rather than a tensor.

    Raises ValueError, naming the file, when its pickle needs anything but the classes of a
    checkpoint's metadata, is malformed, or names files outside its folder.
    """
    with _malformed_named(path):
        fields = _load(path)
        entries = fields["state_dict_metadata"]
        return [
            _place_in_folder(index.state["fqn"], info.state)
            for index, info in fields["storage_data"].items()
            if type(entries[index.state["fqn"]]).__name__ != "TensorStorageMetadata"
        ]


@contextmanager
def _malformed_named(path: Path) -> Iterator[None]:
    """Raise ValueError for whatever a malformed pickle provokes; OSError passes unchanged."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{path} is not the metadata of a checkpoint: {error!r}") from error


def _has_dimensions(entry: Any) -> bool:
    return type(entry).__name__ == "TensorStorageMetadata" and len(entry.state["size"]) > 0


def _chunks_of(
    key: str, fields: dict[str, Any], places: dict[Any, dict[str, Any]]
) -> Iterator[StoredChunk]:
    dtype = fields["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{key} has the dtype {dtype!r}")
    name = str(dtype).removeprefix("torch.")
    for chunk in fields["chunks"]:
        box = Box(_whole_numbers(chunk.state["offsets"]), _whole_numbers(chunk.state["sizes"]))
        place = _place_in_folder(key, places[key, box.start])
        yield StoredChunk(key, box, NAMES.get(name, name), *place)


def _place_in_folder(key: str, place: dict[str, Any]) -> tuple[str, int, int]:
    if place.get("transform_descriptors"):
        raise ValueError(f"{key} is stored with transforms: {place['transform_descriptors']}")
    file = place["relative_path"]
    # The name of `Path("..")` is "..", too.
    if file != Path(file).name or file == "..":
        raise ValueError(f"{key} is in a file outside the folder: {file}")
    offset, length = _whole_numbers((place["offset"], place["length"]))
    return file, offset, length  # `length` is in bytes


def _whole_numbers(values: Any) -> Shape:
    if not all(type(value) is int and value >= 0 for value in values):
        raise TypeError(f"{values!r} are not valid sizes")
    return tuple(values)


class _Inert:
    """Stands for an object or the result of a call; keeps only the attributes of the object."""

    def __init__(self, *arguments: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


_DCP = "torch.distributed.checkpoint"
_NAMES = {
    f"{_DCP}.metadata": (
        "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
        "_MEM_FORMAT_ENCODING MetadataIndex StorageMeta"
    ),
    # Megatron-Core stores the save plans of all ranks in the metadata.
    f"{_DCP}.planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
    f"{_DCP}.filesystem": "_StorageInfo _StoragePrefix",
    "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
    "torch.serialization": "_get_layout",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
    "pathlib": "PosixPath WindowsPath",
    "pathlib._local": "PosixPath WindowsPath",  # Python 3.13's name for the same
}
_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (module, name): type(name, (_Inert,), {})
        for module, names in _NAMES.items()
        for name in names.split()
    },
    **{
        ("torch", key): value
        for key, value in vars(torch).items()
        if isinstance(value, torch.dtype)
    },
    ("torch", "Size"): tuple,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(
                f"its pickle requires {module}.{name}, which is not allowed"
            )
        return _ALLOWED[module, name]


def _load(path: Path) -> dict[str, Any]:
    """The fields of the pickled `Metadata`: inert objects and Python's own types."""
    with errors_named(path):
        content = path.read_bytes()
    fields: dict[str, Any] = _Unpickler(io.BytesIO(content)).load().state
    return fields
