"""Where torch.save put the bytes of tensors. Only the pickle that names them is read.

A file of torch.save is a zip archive, uncompressed: a pickle that builds the tensors, and one
record of bytes per storage. To load a pickle is to run what it asks for, so it is left to torch's
unpickler for weights, which calls nothing but what builds tensors.
"""

import io
import os
import re
import struct
from pathlib import Path
from typing import IO, Any, cast
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor, _weights_only_unpickler

from checkpoint_convert.safetensors_file import TensorPlace
from checkpoint_convert.tensor_io import TORCH_DTYPES

_ZIP_MAGIC = b"PK\x03\x04"
# What comes before a record: the magic and, at the end, the lengths of its name and extra field.
_LOCAL_HEADER = struct.Struct("<4s22x2H")
_ENCRYPTED = 1
_RECORD = "_record"  # an attribute of storages: where they are in the file, and their size
_MAX_PICKLE_BYTES = 100_000_000  # as for headers of safetensors; a tensor takes some 200
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def read_places(path: Path) -> dict[str, TensorPlace]:
    """Place of every tensor of a file that holds a dict of tensors, such as pytorch_model.bin.

    Raises ValueError naming the file when it is truncated, holds anything but such a dict, or its
    pickle asks for a call that loading weights does not need.
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

    `descriptor` is `path`, opened. Raises ValueError like `read_places`.
    """
    where = f"{path} at byte {offset}"
    return _place(_load(descriptor, path, offset, length), path, where, offset)


def _load(descriptor: int, path: Path, offset: int, length: int) -> Any:
    if os.pread(descriptor, len(_ZIP_MAGIC), offset) != _ZIP_MAGIC:
        raise ValueError(
            f"{path} at byte {offset} is nothing that torch.save has written since torch 1.6: load "
            "and save it again with a newer torch, if it can be trusted"
        )
    try:
        archive = _Archive(_FilePart(descriptor, offset, length))
        return _Unpickler(archive).load()
    except Exception as error:  # a malformed file can provoke any
        raise ValueError(
            f"{path} at byte {offset} is no file of tensors: {_reason(error)}"
        ) from error
    finally:
        # Where torch keeps those that are still to be checked; here they are refused.
        torch._utils._sparse_tensors_to_validate.clear()


def _reason(error: Exception) -> str:
    """What torch says of a file, without the advice on how to trust it."""
    asked = re.search(r"GLOBAL (\S+)", str(error))
    if asked:
        return f"its pickle asks for {asked[1]}"
    paragraphs = [part for part in str(error).split("\n\n") if "documentation of torch" not in part]
    return "".join(paragraphs[-1:]).split(". ")[0] or repr(error)


def _place(value: Any, path: Path, where: str, offset: int) -> TensorPlace:
    if not isinstance(value, Tensor):
        raise ValueError(f"{where} is {type(value).__name__}, not a tensor")
    if value.layout is not torch.strided or not value.is_contiguous():
        raise ValueError(f"{where} is sparse or strided: save it again as .contiguous()")
    record = getattr(value.untyped_storage(), _RECORD, None)
    if record is None:
        raise ValueError(f"{where} was saved from the meta device, without values")
    start, num_bytes = record
    first = value.storage_offset() * value.element_size()
    if first + value.nbytes > num_bytes:
        raise ValueError(f"{where} ends at byte {first + value.nbytes} of {num_bytes} bytes")
    dtype = _DTYPE_NAMES.get(value.dtype, str(value.dtype).removeprefix("torch."))
    return TensorPlace(path, dtype, tuple(value.shape), offset + start + first, value.nbytes)


class _Archive:
    """The records of a file of torch.save, which are stored as they are."""

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
        """Content of a small record."""
        start, size = self.place(name)
        if size > max_bytes:
            raise ValueError(f"its record {name} has {size} bytes, more than {max_bytes}")
        self._file.seek(start)
        return self._file.read(size)


class _Unpickler(_weights_only_unpickler.Unpickler):
    """Torch's unpickler for weights, whose storages have a place in the file instead of values.

    torch.load says places as well, with ``map_location="meta"``. But it calculates them as if no
    other program had written the file, and would read storages of the other byte order.
    """

    def __init__(self, archive: _Archive) -> None:
        super().__init__(io.BytesIO(archive.bytes("data.pkl", _MAX_PICKLE_BYTES)), encoding="utf-8")
        self._archive = archive

    def persistent_load(self, pid: Any) -> torch.storage.TypedStorage:
        _, kind, key, _, num_elements = pid
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        start, num_bytes = self._archive.place(f"data/{key}")
        if num_elements * dtype.itemsize != num_bytes:
            raise ValueError(
                f"its record data/{key} has {num_bytes} bytes, not {num_elements} of {dtype}"
            )
        storage = torch.UntypedStorage(num_bytes, device="meta")
        setattr(storage, _RECORD, (start, num_bytes))  # its own size grows with that of a tensor
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


class _FilePart:
    """Some bytes of a file, for `ZipFile` to read; its position is not the descriptor's."""

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
        data = os.pread(self._descriptor, size, self._start + self._position)
        self._position += len(data)
        return data
