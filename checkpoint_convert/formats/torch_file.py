"""Finds the values of tensors in files of torch.save, to read or to write them in place.

Such a file is an uncompressed zip archive: a pickle that describes the tensors, and one record of
bytes per storage. torch loads the pickle, restricted to what builds tensors, onto the meta device:
no values are read. torch computes the offsets of storages as it would have written them, so each
place is compared with the archive's directory: another program may have packed the archive.
"""

import os
import pickle
import re
import struct
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple, cast
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor

from checkpoint_convert.formats import errors_named
from checkpoint_convert.formats.safetensors_file import NAMES, TensorPlace
from checkpoint_convert.formats.torch_dtypes import DTYPES
from parallel import Shape

_ZIP_MAGIC = b"PK\x03\x04"
# Header of a record: starts with the magic and ends with the lengths of its name and extra field.
_RECORD_HEADER = struct.Struct("<4s22x2H")


def read_places(path: Path) -> dict[str, TensorPlace]:
    """Place of every tensor of a file that holds a dict of tensors, such as pytorch_model.bin.

    Raises ValueError, naming the file, when it is truncated, holds anything but such a dict, or its
    pickle requests a call that loading weights does not need.
    """
    with path.open("rb", buffering=0) as file:
        length = os.fstat(file.fileno()).st_size
        loaded, records = _load(file.fileno(), path, 0, length)
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} holds {type(loaded).__name__}, not a dict of tensors")
    return {
        str(name): _place(value, records, path, f"{path}: {name!r}", 0)
        for name, value in loaded.items()
    }


def read_place(descriptor: int, path: Path, offset: int, length: int) -> TensorPlace:
    """Place of the one tensor that was saved into `length` bytes of `path` from `offset` on.

    `descriptor` is an open file descriptor of `path`. Raises ValueError like `read_places`.
    """
    value, records = _load(descriptor, path, offset, length)
    return _place(value, records, path, f"{path} at byte {offset}", offset)


def screen(descriptor: int, path: Path, offset: int, length: int) -> None:
    """Raise ValueError if the pickle saved there requests any call that tensors do not need."""
    _load(descriptor, path, offset, length)


def _load(descriptor: int, path: Path, offset: int, length: int) -> tuple[Any, dict[int, int]]:
    """Load an object on the meta device; also return each record's size, by its first byte."""
    where = f"{path} at byte {offset}"
    part = _FilePart(descriptor, offset, length)
    try:
        if part.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC:
            records = _records(part)
            part.seek(0)
            file = cast(IO[bytes], part)
            return torch.load(file, map_location="meta", weights_only=True), records
    except Exception as error:  # a malformed file can provoke any
        # zipfile and torch replace an error of the read by an error of their own.
        if part.failure is not None:
            with errors_named(path):
                raise part.failure from None
        raise ValueError(f"{where} is not a file of tensors: {_reason(error)}") from error
    raise ValueError(
        f"{where} is not in the format of torch.save since torch 1.6: if you trust it, load it and "
        "save it again with a newer torch"
    )


def _reason(error: Exception) -> str:
    """One line: torch's text is long, and recommends to load the file without restriction."""
    if isinstance(error, pickle.UnpicklingError):
        name = re.search(r"GLOBAL (\S+)", str(error))
        what = name[1] if name else "more than tensors"
        return f"its pickle requires {what}, which is not allowed"
    return str(error).partition("\n")[0] or repr(error)


def _records(part: "_FilePart") -> dict[int, int]:
    """Size of each record by its first byte; ValueError for records that are not plain bytes."""
    records = {}
    for record in ZipFile(cast(IO[bytes], part)).infolist():
        name = record.filename.partition("/")[2]
        if record.compress_type != ZIP_STORED:
            raise ValueError(f"its record {name} is compressed: load it and save it with torch")
        part.seek(record.header_offset)
        magic, *lengths = _RECORD_HEADER.unpack(part.read(_RECORD_HEADER.size))
        start = record.header_offset + _RECORD_HEADER.size + sum(lengths)
        if magic != _ZIP_MAGIC or start + record.file_size > part.length:
            raise ValueError(f"its record {name} is not where its directory says")
        part.seek(start)
        # torch would swap bytes on the meta device, where there are none: a segmentation fault.
        if name == "byteorder" and part.read(record.file_size) != b"little":
            raise ValueError("its bytes are not in little-endian order")
        records[start] = record.file_size
    return records


def _place(value: Any, records: dict[int, int], path: Path, where: str, offset: int) -> TensorPlace:
    if not isinstance(value, Tensor):
        raise ValueError(f"{where} is {type(value).__name__}, not a tensor")
    if value.layout != torch.strided or not value.is_contiguous():
        raise ValueError(f"{where} is sparse or strided: save it again as .contiguous()")
    # Offset in the file of a storage that torch loaded onto the meta device; None without values.
    # torch has no public name for it.
    storage = value.untyped_storage()._checkpoint_offset
    if storage is None:
        raise ValueError(f"{where} is from the meta device, saved without values")
    if storage not in records:
        raise ValueError(f"{where} is not where torch saves it: load it and save it with torch")
    first = int(value.storage_offset()) * value.itemsize
    if first + value.nbytes > records[storage]:
        raise ValueError(f"{where} ends at byte {first + value.nbytes} of {records[storage]} bytes")
    dtype = str(value.dtype).removeprefix("torch.")
    start = offset + storage + first
    return TensorPlace(path, NAMES.get(dtype, dtype), tuple(value.shape), start, value.nbytes)


class _FilePart:
    """A byte range of a file as a file object; leaves the descriptor's position alone."""

    failure: OSError | None = None
    """First error of the operating system while reading it."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        self.length = length
        self._descriptor, self._start, self._position = descriptor, start, 0

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
            self.failure = error
            raise
        self._position += len(data)
        return data


class SavedTensor(NamedTuple):
    """A torch.save file without the values of its only tensor."""

    head: bytes
    """The bytes before the values."""
    num_bytes: int
    """Size of the values."""
    tail: bytes
    """The bytes after the values."""

    @property
    def length(self) -> int:
        """Bytes of the whole file."""
        return len(self.head) + self.num_bytes + len(self.tail)


@cache
def saved_tensor(shape: Shape, dtype: str) -> SavedTensor:
    """Bytes of torch.save for a contiguous tensor; its memory is never touched."""
    tensor = torch.empty(shape, dtype=DTYPES[dtype], device="cpu")
    around = _BytesAroundValues()
    with torch.serialization.skip_data():
        torch.save(tensor, cast(IO[bytes], around))
    head, tail = around.parts
    return SavedTensor(bytes(head), tensor.nbytes, bytes(tail))


class _BytesAroundValues:
    """File object that keeps the bytes before and after the values, which torch.save seeks past."""

    def __init__(self) -> None:
        self.parts = [bytearray()]

    def write(self, data: bytes) -> int:
        self.parts[-1] += data
        return len(data)

    def seek(self, num_bytes: int, whence: int) -> None:
        self.parts.append(bytearray())

    def flush(self) -> None:
        pass
