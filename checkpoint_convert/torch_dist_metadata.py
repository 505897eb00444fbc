"""What `.metadata` of a torch_dist checkpoint says, read without running any of it.

The file is a pickle, and to load a pickle is to call whatever it names. Here every class that
torch.distributed.checkpoint and Megatron-Core write is replaced by one that only keeps its state,
and everything else is refused.
"""

import io
import pickle
import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parallel import Box, Shape


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a tensor, saved by torch.save into `length` bytes of `file` from `offset` on."""

    box: Box
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint and the chunks that it is cut into."""

    shape: Shape
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]


def read_metadata(
    path: Path, keys: Callable[[str], bool]
) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """The tensors that `keys` chooses, and the names of all entries that are no tensors with
    dimensions: pickled objects and scalars.

    Raises ValueError naming the file when it asks for anything but the classes of a checkpoint's
    metadata, is malformed, or names files outside its folder.
    """
    try:
        data = path.read_bytes()
        _check_memo(data)
        fields = _InertUnpickler(io.BytesIO(data)).load().state
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


def _has_dimensions(entry: Any) -> bool:
    return type(entry).__name__ == "TensorStorageMetadata" and len(entry.state["size"]) > 0


def _tensor(key: str, fields: dict[str, Any], places: dict[Any, dict[str, Any]]) -> StoredTensor:
    dtype = fields["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{key} has the dtype {dtype!r}")
    chunks = []
    for chunk in fields["chunks"]:
        box = Box(_integers(chunk.state["offsets"]), _integers(chunk.state["sizes"]))
        place = places[key, box.start]
        if place.get("transform_descriptors"):
            raise ValueError(f"{key} is stored with transforms: {place['transform_descriptors']}")
        file = place["relative_path"]
        if file != Path(file).name or file == "..":
            raise ValueError(f"{key} is in a file outside the folder: {file}")
        chunks.append(StoredChunk(box, file, *_integers((place["offset"], place["length"]))))
    return StoredTensor(_integers(fields["size"]), dtype, tuple(chunks))


def _integers(values: Any) -> Shape:
    if not all(type(value) is int and value >= 0 for value in values):
        raise TypeError(f"{values!r} are no sizes")
    return tuple(values)


class _Inert:
    """Stands for an object of the pickle: keeps its state and runs nothing."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        """Arguments are those of enums, layouts and paths; nobody needs them."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


_DCP = "torch.distributed.checkpoint"
_INERT = {
    f"{_DCP}.metadata": (
        "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
        "_MEM_FORMAT_ENCODING MetadataIndex StorageMeta"
    ),
    # Megatron-Core keeps the plans of all ranks with the metadata.
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
        for module, names in _INERT.items()
        for name in names.split()
    },
    **{
        ("torch", str(dtype).removeprefix("torch.")): dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
    },
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
}


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ALLOWED[module, name]


_OPERATIONS = {operation.code.encode("latin-1"): operation for operation in pickletools.opcodes}
_REMEMBER = ("PUT", "LONG_BINPUT")  # BINPUT's index is a byte, MEMOIZE's the number before it
# Operations in a row, as far as they have a fixed size: a million of them take 0.1 s.
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
    """Refuse a pickle that remembers something under an index that its size does not explain.

    The unpickler makes a list of that length: ten bytes could ask for any amount of memory.
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
