"""Reads the pickle `.metadata` of a torch_dist checkpoint without executing anything in it.

torch and Megatron-Core load it without restriction. Here every class of theirs that it names is
replaced by an inert one, and everything else is refused.
"""

import io
import pickle
import pickletools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from checkpoint_convert.formats.safetensors_file import NAMES
from checkpoint_convert.formats.tensor_io import errors_named
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
    with _malformed_named(path):
        fields = _load(path)
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
        return tensors, objects


def read_object_places(path: Path) -> list[tuple[str, int, int]]:
    """File, offset and length of every entry that is a pickled object rather than a tensor.

    Raises ValueError like `read_metadata`.
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
    """Raise ValueError for whatever a malformed pickle provokes; OSError stays what it is."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{path} is not the metadata of a checkpoint: {error!r}") from error


def _has_dimensions(entry: Any) -> bool:
    return type(entry).__name__ == "TensorStorageMetadata" and len(entry.state["size"]) > 0


def _tensor(key: str, fields: dict[str, Any], places: dict[Any, dict[str, Any]]) -> StoredTensor:
    dtype = fields["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{key} has the dtype {dtype!r}")
    name = str(dtype).removeprefix("torch.")
    chunks = []
    for chunk in fields["chunks"]:
        box = Box(_whole_numbers(chunk.state["offsets"]), _whole_numbers(chunk.state["sizes"]))
        place = places[key, box.start]
        chunks.append(StoredChunk(box, *_place_in_folder(key, place)))
    return StoredTensor(_whole_numbers(fields["size"]), NAMES.get(name, name), tuple(chunks))


def _place_in_folder(key: str, place: dict[str, Any]) -> tuple[str, int, int]:
    if place.get("transform_descriptors"):
        raise ValueError(f"{key} is stored with transforms: {place['transform_descriptors']}")
    file = place["relative_path"]
    if file != Path(file).name or file == "..":
        raise ValueError(f"{key} is in a file outside the folder: {file}")
    offset, length = _whole_numbers((place["offset"], place["length"]))
    return file, offset, length


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
    """The fields of the pickled `Metadata`, whose values are inert objects and Python's own."""
    with errors_named(path):
        content = path.read_bytes()
    _check_memo(content)
    fields: dict[str, Any] = _Unpickler(io.BytesIO(content)).load().state
    return fields


_OPERATIONS = {operation.code.encode("latin-1"): operation for operation in pickletools.opcodes}
_REMEMBER = ("PUT", "LONG_BINPUT")  # BINPUT's index is a byte, MEMOIZE's the number before it
# A run of operations of fixed size: a million of them take 0.1 s.
_FIXED_SIZE = re.compile(
    b"(?:%s)*+"
    % b"|".join(
        re.escape(code) + b"." * (operation.arg.n if operation.arg else 0)
        for code, operation in _OPERATIONS.items()
        if operation.name not in ("STOP", *_REMEMBER)
        if operation.arg is None or operation.arg.n >= 0
    ),
    re.DOTALL,
)


def _check_memo(data: bytes) -> None:
    """Refuse a pickle with a memo index that is not less than its size in bytes.

    The unpickler allocates a list of that length: ten bytes could request any amount of memory.
    """
    stream = io.BytesIO(data)
    while True:
        stream.seek(_FIXED_SIZE.match(data, stream.tell()).end())  # type: ignore[union-attr]
        operation = _OPERATIONS[stream.read(1)]
        if operation.arg is None:  # the end
            return
        value = operation.arg.reader(stream)
        if operation.name in _REMEMBER and not 0 <= value < len(data):
            raise pickle.UnpicklingError(f"it remembers {value} things in {len(data)} bytes")
