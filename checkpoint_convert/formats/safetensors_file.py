"""Headers of safetensors files, which say where the bytes of each tensor are. Needs no torch.

A file is 8 bytes of header length (little endian), the header as JSON, then the data. Offsets in
the header count from the first byte of the data.
"""

import json
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from checkpoint_convert.folder import read_json
from parallel import Shape

ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes per element of the supported weight dtypes."""
TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Torch's names for those dtypes, which config.json uses."""
QUANTIZED_TORCH_NAMES = {"F8_E4M3": "float8_e4m3fn", "I8": "int8", "U8": "uint8"}
"""Torch's names for the dtypes of quantised weights."""
STORED_SIZES = {**ITEM_SIZES, **dict.fromkeys(QUANTIZED_TORCH_NAMES, 1)}
"""Bytes per element of all of these dtypes."""
NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
_METADATA = "__metadata__"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


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
    try:
        with safe_open(path, "np"):  # checks all of the header against the size of the file
            pass
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a safetensors file ({error}): was it truncated?"
        ) from error
    with path.open("rb") as file:
        (num_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(num_bytes))
    header.pop(_METADATA, None)
    places = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        offset = 8 + num_bytes + start
        places[name] = TensorPlace(path, entry["dtype"], tuple(entry["shape"]), offset, end - start)
    return places


def stored_names(folder: Path) -> Collection[str]:
    """Names of the tensors in `folder`, by its index or single file; none without either."""
    if (folder / INDEX_FILE).is_file():
        index = read_json(folder / INDEX_FILE).get("weight_map")
        return index if isinstance(index, dict) else ()
    return read_header(folder / SINGLE_FILE) if (folder / SINGLE_FILE).is_file() else ()


def copy_tensors(
    places: Mapping[str, TensorPlace], copies: Mapping[str, TensorPlace], chunk: int = 1 << 24
) -> None:
    """Copy the bytes of each stored tensor to the place of its name in `copies`."""
    for name, place in places.items():
        with place.file.open("rb") as source, copies[name].file.open("r+b") as target:
            source.seek(place.offset)
            target.seek(copies[name].offset)
            for start in range(0, place.num_bytes, chunk):
                target.write(source.read(min(chunk, place.num_bytes - start)))


def create_file(path: Path, tensors: Mapping[str, tuple[str, Shape]]) -> None:
    """Create a file of full size that holds `tensors`, given as (dtype, shape), in order, as zeros.

    Only the header is written; the data takes no disk space until it is written.
    """
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * STORED_SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format requires data to begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
