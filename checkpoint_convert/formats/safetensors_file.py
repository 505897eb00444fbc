"""Headers of safetensors files, which say where the bytes of each tensor are. Needs no torch.

A file is 8 bytes of header length (little endian), the header as JSON, then the data. Offsets in
the header count from the first byte of the data.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from parallel import Shape

ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes per element of the supported weight dtypes."""
TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Torch's names for those dtypes, which config.json uses."""
NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
_METADATA = "__metadata__"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor is stored: row-major, from byte `offset` of `file` on."""

    file: Path
    dtype: str
    shape: Shape
    offset: int
    num_bytes: int


def read_header(path: Path) -> dict[str, TensorPlace]:
    """Place of every tensor in one file.

    Raises ValueError, naming the file, when it is truncated or its header is malformed.
    """
    file_size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < header_size <= min(file_size - 8, _MAX_HEADER_BYTES):
            raise ValueError(
                f"{path} is not a safetensors file: a header of {header_size} bytes is not "
                f"possible in its {file_size} bytes"
            )
        header = file.read(header_size)
    try:
        entries = {k: v for k, v in json.loads(header).items() if k != _METADATA}
        places = {name: _place(path, 8 + header_size, entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} has a malformed safetensors header: {error!r}") from error
    _check_tiling(path, places, 8 + header_size, file_size)
    return places


def _place(path: Path, data_start: int, entry: Mapping[str, Any]) -> TensorPlace:
    shape, (start, end) = entry["shape"], entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError(f"{entry} has numbers that are not valid sizes")
    place = TensorPlace(path, entry["dtype"], tuple(shape), data_start + start, end - start)
    expected = prod(place.shape) * ITEM_SIZES.get(place.dtype, 0)
    if expected and place.num_bytes != expected:
        raise ValueError(f"{entry} should take {expected} bytes")
    return place


def _check_tiling(path: Path, places: Mapping[str, TensorPlace], start: int, end: int) -> None:
    """Check that tensors lie back to back from the header to the end of the file, as required."""
    for name, place in sorted(places.items(), key=lambda item: item[1].offset):
        if place.offset != start or place.num_bytes < 0:
            raise ValueError(f"{path}: {name} starts at byte {place.offset}, not at {start}")
        start += place.num_bytes
    if start != end:
        raise ValueError(f"{path} has {end} bytes, its header describes {start}: was it truncated?")


def create_file(path: Path, tensors: Mapping[str, tuple[str, Shape]]) -> None:
    """Create a file of full size that holds `tensors`, given as (dtype, shape), in order, as zeros.

    Only the header is written; the data takes no disk space until it is written.
    """
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * ITEM_SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format requires data to begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
