"""Locates the bytes of tensors in torch.save files. Only the pickle that names them is read.

A torch.save file is an uncompressed zip archive: a pickle that builds the tensors, and one record
of bytes per storage.
"""

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, cast
from zipfile import ZIP_STORED, ZipFile

from checkpoint_convert.formats.safetensors_file import NAMES, TensorPlace
from checkpoint_convert.formats.tensor_io import errors_named
from checkpoint_convert.formats.torch_pickle import ITEM_SIZES, load, whole_numbers
from parallel import Shape

_ZIP_MAGIC = b"PK\x03\x04"
# Header of a record: starts with the magic and ends with the lengths of its name and extra field.
_LOCAL_HEADER = struct.Struct("<4s22x2H")
_ENCRYPTED = 1
_MAX_PICKLE_BYTES = 100_000_000  # as for headers of safetensors; a tensor takes about 200


def read_places(path: Path) -> dict[str, TensorPlace]:
    """Place of every tensor of a file that holds a dict of tensors, such as pytorch_model.bin.

    Raises ValueError, naming the file, when it is truncated, holds anything but such a dict, or its
    pickle requests a call that loading weights does not need.
    """
    with path.open("rb", buffering=0) as file:
        length = os.fstat(file.fileno()).st_size
        loaded = _load(file.fileno(), path, 0, length)
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} holds {type(loaded).__name__}, not a dict of tensors")
    return {
        str(name): _place(value, path, f"{path}: {name!r}", 0) for name, value in loaded.items()
    }


def read_place(descriptor: int, path: Path, offset: int, length: int) -> TensorPlace:
    """Place of the one tensor that was saved into `length` bytes of `path` from `offset` on.

    `descriptor` is an open file descriptor of `path`. Raises ValueError like `read_places`.
    """
    where = f"{path} at byte {offset}"
    return _place(_load(descriptor, path, offset, length), path, where, offset)


def screen(descriptor: int, path: Path, offset: int, length: int) -> None:
    """Raise ValueError if the pickle saved there requests any call that tensors do not need."""
    _load(descriptor, path, offset, length)


def _load(descriptor: int, path: Path, offset: int, length: int) -> Any:
    with errors_named(path):
        magic = os.pread(descriptor, len(_ZIP_MAGIC), offset)
    if magic != _ZIP_MAGIC:
        raise ValueError(
            f"{path} at byte {offset} is not in the format of torch.save since torch 1.6: if you "
            "trust it, load it and save it again with a newer torch"
        )
    try:
        archive = _Archive(_FilePart(descriptor, offset, length))
        return load(archive.bytes("data.pkl", _MAX_PICKLE_BYTES), archive.storage)
    except _UnreadableError as error:
        with errors_named(path):
            raise error.cause from None
    except Exception as error:  # a malformed file can provoke any
        reason = str(error) or repr(error)
        raise ValueError(f"{path} at byte {offset} is not a file of tensors: {reason}") from error


def _place(value: Any, path: Path, where: str, offset: int) -> TensorPlace:
    try:
        tensor = _tensor(value)
    except _NoTensorError as error:
        raise ValueError(f"{where} is {error}") from error
    except Exception as error:  # the arguments of a call can be anything
        raise ValueError(f"{where} is malformed: {error!r}") from error
    storage, start, num_bytes = tensor.storage, tensor.start, tensor.num_bytes
    if start + num_bytes > storage.num_bytes:
        raise ValueError(f"{where} ends at byte {start + num_bytes} of {storage.num_bytes} bytes")
    dtype = NAMES.get(tensor.dtype, tensor.dtype)
    return TensorPlace(path, dtype, tensor.shape, offset + storage.start + start, num_bytes)


@dataclass(frozen=True, slots=True)
class _Storage:
    """A record of values: its place and the dtype that the pickle names."""

    start: int
    num_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor: `num_bytes` of a storage from its byte `start` on."""

    storage: _Storage
    start: int
    num_bytes: int
    shape: Shape
    dtype: str


class _NoTensorError(Exception):
    """A value is not a supported tensor; the message says what it is instead."""


def _tensor(value: Any) -> _Tensor:
    """The tensor that a pickle would build, from the calls that it requests."""
    for _ in range(_MAX_WRAPPERS):  # bounded: in a pickle, a call can be its own argument
        if type(value).__name__ in _WRAPPERS:
            value = _WRAPPERS[type(value).__name__](value)
    kind = type(value).__name__
    if kind == "_rebuild_meta_tensor_no_storage":
        raise _NoTensorError("from the meta device, saved without values")
    if kind == "_rebuild_sparse_tensor":
        raise _NoTensorError(_SCATTERED)
    if kind not in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"):
        raise _NoTensorError(f"{kind}, not a tensor")
    storage, first, shape, strides = value.arguments[:4]
    dtype = value.arguments[6] if kind.endswith("v3") else storage.dtype
    (first,), shape, strides = map(whole_numbers, ((first,), shape, strides))
    if not _is_contiguous(shape, strides):
        raise _NoTensorError(_SCATTERED)
    size = ITEM_SIZES[dtype]
    return _Tensor(storage, first * size, prod(shape) * size, shape, dtype)


_SCATTERED = "sparse or strided: save it again as .contiguous()"
_MAX_WRAPPERS = 3
# Calls around the one that builds a tensor, if it is a parameter or has attributes.
_WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "_rebuild_parameter": lambda value: value.arguments[0],
    "_rebuild_parameter_with_state": lambda value: value.arguments[0],
    "_rebuild_from_type_v2": lambda value: value.arguments[0](*value.arguments[2]),
}


def _is_contiguous(shape: Shape, strides: Shape) -> bool:
    wanted = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return 0 in shape or all(
        size == 1 or stride == step
        for size, stride, step in zip(shape, strides, wanted, strict=True)
    )


class _UnreadableError(Exception):
    """Reading the file failed. Not an OSError, which zipfile would report as a malformed file."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _Archive:
    """The records of a torch.save file, which are stored uncompressed."""

    def __init__(self, file: "_FilePart") -> None:
        self._file = file
        self._records = {r.filename: r for r in ZipFile(cast(IO[bytes], file)).infolist()}
        self._root = next(iter(self._records)).partition("/")[0]
        if self.has("byteorder") and self.bytes("byteorder", 10) != b"little":
            raise ValueError("its bytes are not in little-endian order")

    def has(self, name: str) -> bool:
        """Whether there is a record of this name."""
        return f"{self._root}/{name}" in self._records

    def place(self, name: str) -> tuple[int, int]:
        """First byte and size of a record."""
        if not self.has(name):
            raise ValueError(f"it has no record {name}")
        record = self._records[f"{self._root}/{name}"]
        if record.compress_type != ZIP_STORED or record.flag_bits & _ENCRYPTED:
            raise ValueError(f"its record {name} is compressed: load it and save it with torch")
        self._file.seek(record.header_offset)
        header = self._file.read(_LOCAL_HEADER.size)
        magic, *name_and_extra = _LOCAL_HEADER.unpack(header)
        start = record.header_offset + len(header) + sum(name_and_extra)
        if magic != _ZIP_MAGIC or start + record.file_size > self._file.length:
            raise ValueError(f"its record {name} is not where its directory says")
        return start, record.file_size

    def bytes(self, name: str, max_bytes: int) -> bytes:
        """Content of a record; ValueError if it has more than `max_bytes`."""
        start, size = self.place(name)
        if size > max_bytes:
            raise ValueError(f"its record {name} has {size} bytes, more than {max_bytes}")
        self._file.seek(start)
        return self._file.read(size)

    def storage(self, pid: Any) -> _Storage:
        """The record of a storage that the pickle mentions."""
        _, dtype, key, _, num_elements = pid
        start, num_bytes = self.place(f"data/{key}")
        if num_elements * ITEM_SIZES[dtype] != num_bytes:
            raise ValueError(
                f"its record data/{key} has {num_bytes} bytes, not {num_elements} of {dtype}"
            )
        return _Storage(start, num_bytes, dtype)


class _FilePart:
    """A byte range of a file for `ZipFile` to read; its position is not the descriptor's."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        self.length = length
        self._descriptor, self._start = descriptor, start
        self._position = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        position = offset + (0, self._position, self.length)[whence]
        if position < 0:
            raise OSError(f"there is no byte {position}")
        self._position = position
        return position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        room = max(0, self.length - self._position)
        size = room if size < 0 else min(size, room)
        try:
            data = os.pread(self._descriptor, size, self._start + self._position)
        except OSError as error:
            raise _UnreadableError(error) from error
        self._position += len(data)
        return data
