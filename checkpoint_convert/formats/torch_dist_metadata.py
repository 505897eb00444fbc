"""Reads the pickle `.metadata` of a torch_dist checkpoint without executing anything in it.

The classes of torch.distributed.checkpoint are recognized by name; see `torch_pickle`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint_convert.formats.safetensors_file import NAMES
from checkpoint_convert.formats.tensor_io import errors_named
from checkpoint_convert.formats.torch_pickle import ITEM_SIZES, load, whole_numbers
from parallel import Box, Shape


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a tensor, saved by torch.save into `length` bytes of `file` from `offset` on."""

    box: Box
    file: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """Number of bytes that `file` must have."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint and its chunks."""

    shape: Shape
    dtype: str
    """By safetensors' name, or by torch's if it is not supported."""
    chunks: tuple[StoredChunk, ...]


def read_metadata(
    path: Path, keys: Callable[[str], bool]
) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """The tensors whose keys `keys` accepts, and the keys of all other kinds of entries: pickled
    objects and 0-dimensional tensors.

    Raises ValueError, naming the file, when its pickle needs anything but the classes of a
    checkpoint's metadata, is malformed, or names files outside its folder.
    """
    content = _content(path)
    try:
        fields = load(content).state
        places = {
            (index.state["fqn"], index.state.get("offset")): info.state
            for index, info in fields["storage_data"].items()
        }
        entries = fields["state_dict_metadata"]
        objects = tuple(key for key, entry in entries.items() if not _has_dimensions(entry))
        tensors = {
            key: _tensor(key, entry.state, places)
            for key, entry in entries.items()
            if _has_dimensions(entry) and keys(key)
        }
    except Exception as error:  # a malformed pickle can provoke any
        raise ValueError(f"{path} is not the metadata of a checkpoint: {error!r}") from error
    return tensors, objects


def read_object_places(path: Path) -> list[tuple[str, int, int]]:
    """File, offset and length of every entry that is a pickled object rather than a tensor.

    Raises ValueError like `read_metadata`.
    """
    content = _content(path)
    try:
        fields = load(content).state
        entries = fields["state_dict_metadata"]
        return [
            _place_in_folder(index.state["fqn"], info.state)
            for index, info in fields["storage_data"].items()
            if type(entries[index.state["fqn"]]).__name__ != "TensorStorageMetadata"
        ]
    except Exception as error:  # a malformed pickle can provoke any
        raise ValueError(f"{path} is not the metadata of a checkpoint: {error!r}") from error


def _content(path: Path) -> bytes:
    with errors_named(path):
        return path.read_bytes()


def _has_dimensions(entry: Any) -> bool:
    return type(entry).__name__ == "TensorStorageMetadata" and len(entry.state["size"]) > 0


def _tensor(key: str, fields: dict[str, Any], places: dict[Any, dict[str, Any]]) -> StoredTensor:
    dtype = fields["properties"].state[0]
    if dtype not in ITEM_SIZES:
        raise TypeError(f"{key} has the dtype {dtype!r}")
    chunks = []
    for chunk in fields["chunks"]:
        box = Box(whole_numbers(chunk.state["offsets"]), whole_numbers(chunk.state["sizes"]))
        place = places[key, box.start]
        chunks.append(StoredChunk(box, *_place_in_folder(key, place)))
    return StoredTensor(whole_numbers(fields["size"]), NAMES.get(dtype, dtype), tuple(chunks))


def _place_in_folder(key: str, place: dict[str, Any]) -> tuple[str, int, int]:
    if place.get("transform_descriptors"):
        raise ValueError(f"{key} is stored with transforms: {place['transform_descriptors']}")
    file = place["relative_path"]
    if file != Path(file).name or file == "..":
        raise ValueError(f"{key} is in a file outside the folder: {file}")
    offset, length = whole_numbers((place["offset"], place["length"]))
    return file, offset, length
