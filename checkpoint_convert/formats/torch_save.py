"""Produces the files that torch.save writes, byte for byte, without torch and without the values.

Such a file is an uncompressed zip archive of records: a pickle, the values of each tensor, and a
few that describe the format.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any
from zlib import crc32

from checkpoint_convert.formats.safetensors_file import ITEM_SIZES, TORCH_NAMES
from checkpoint_convert.formats.torch_pickle import STORAGES, Call, Name, Persistent, dump
from parallel import Shape

_ALIGNMENT = 64  # of record contents
_FLAGS = 0x0808  # sizes follow the content; names are in UTF-8
_HEADER = struct.Struct("<4s2xH18x2H")
_SIZES = struct.Struct("<4s3I")
_ENTRY = struct.Struct("<4s4xH6x3IH12xI")
_END_64 = struct.Struct("<4sQ2H8x4Q 4s4xQI")  # with the locator that follows it
_END = struct.Struct("<4s4x2H2I2x")
_VALUES = "data/0"
# std::hash of the names of all records, with and without values; torch writes it into the last one.
_NAMES_HASH = {True: 15728199511854643026, False: 2908468677762923104}
_STORAGE_OF = {dtype: Name("torch", storage) for storage, dtype in STORAGES.items()}
_REBUILD = Name("torch._utils", "_rebuild_tensor_v2")
_ORDERED_DICT = Name("collections", "OrderedDict")


@dataclass(frozen=True, slots=True)
class SavedTensor:
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
    """What torch.save writes for a contiguous tensor of 1 byte to 4 GiB.

    Without checksums, as after ``torch.serialization.set_crc32_options(False)``: they are never
    read.
    """
    storage = ("storage", _STORAGE_OF[TORCH_NAMES[dtype]], "0", "cpu", prod(shape))
    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    hooks = Call(_ORDERED_DICT)
    tensor = Call(_REBUILD, (Persistent(storage), 0, shape, strides, False, hooks))
    num_bytes = prod(shape) * ITEM_SIZES[dtype]
    head, tail = _archive(_records(tensor, has_values=True), num_bytes)
    return SavedTensor(head, num_bytes, tail)


def saved_object(value: Any) -> bytes:
    """What torch.save writes for a value without tensors."""
    return b"".join(_archive(_records(value, has_values=False), None))


def _records(value: Any, *, has_values: bool) -> dict[str, bytes]:
    """Names and contents of all records; the record of values is left empty."""
    records = {
        "data.pkl": dump(value),
        ".format_version": b"1",
        ".storage_alignment": b"%d" % _ALIGNMENT,
        "byteorder": b"little",
        **({_VALUES: b""} if has_values else {}),
        "version": b"3\n",
    }
    checksum = 0
    for content in records.values():  # as boost::hash_combine does
        mixed = (0 if has_values else crc32(content)) + 0x9E3779B9 + (checksum << 6)
        checksum = (checksum ^ (mixed + (checksum >> 2))) % (1 << 64)
    identity = b"%020d%020d" % (_NAMES_HASH[has_values], checksum)
    return records | {".data/serialization_id": identity}


def _archive(records: Mapping[str, bytes], num_bytes: int | None) -> tuple[bytes, bytes]:
    """The zip archive of the records, as the bytes before and after the `num_bytes` of values.

    None: the archive has no values, and has checksums.
    """
    head, data, directory, gap = b"", bytearray(), bytearray(), 0
    for key, content in records.items():
        name = f"archive/{key}".encode()
        start = len(head) + gap + len(data)
        padding = -(start + _HEADER.size + len(name) + 4) % _ALIGNMENT
        data += _HEADER.pack(b"PK\3\4", _FLAGS, len(name), padding + 4) + name
        data += b"FB" + padding.to_bytes(2, "little") + b"Z" * padding + content
        size, checksum = len(content), crc32(content)
        if num_bytes is not None:
            checksum = 0
            if key == _VALUES:
                head, data, gap, size = bytes(data), bytearray(), num_bytes, num_bytes
        data += _SIZES.pack(b"PK\7\10", checksum, size, size)
        directory += _ENTRY.pack(b"PK\1\2", _FLAGS, checksum, size, size, len(name), start) + name
    start, count = len(head) + gap + len(data), len(records)
    place = len(directory), start
    end_64 = _END_64.pack(
        *(b"PK\6\6", 44, 0x31E, 45, count, count, *place), *(b"PK\6\7", start + len(directory), 1)
    )
    data += directory + end_64 + _END.pack(b"PK\5\6", count, count, *place)
    return head, bytes(data)
