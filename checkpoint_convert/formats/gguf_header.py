"""The header of a GGUF file: its metadata, and where its tensors are.

The gguf library reads headers too, but trusts every length that a file declares: for an array of
10^12 numbers in a file of 133 bytes it runs out of memory. It also takes seconds for a vocabulary.
"""

import os
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from checkpoint_convert.formats.safetensors_file import ITEM_SIZES, TensorPlace
from parallel import Shape

# `general.architecture` of a file -> the families that llama.cpp stores under that name.
ARCHITECTURES = {
    "llama": ("llama", "mistral", "mixtral"),
    "qwen2": ("qwen2",),
    "qwen3": ("qwen3",),
    "qwen3moe": ("qwen3_moe",),
}
BYTES = "U8"  # the stored dtype of blocks of a quantized type
_VERSIONS = (2, 3)
_BIG_ENDIAN = [b"GGUF" + version.to_bytes(4, "big") for version in _VERSIONS]
# The types of metadata values: numbers, by numpy's names, and two others.
_NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9


def gguf_library() -> Any:
    """The package `gguf`; ValueError where it is not installed."""
    try:
        import gguf  # noqa: PLC0415 - an extra that only GGUF files need
    except ModuleNotFoundError:
        raise ValueError(
            "reading a GGUF file needs the package gguf: install the extra `gguf`"
        ) from None
    return gguf


class GgufHeader:
    """The metadata of a GGUF file, and where its tensors are.

    Raises ValueError, naming the file, when it is truncated or malformed, has an unsupported
    architecture, or is one of several files of a model.
    """

    def __init__(self, path: Path) -> None:
        gguf_library()  # fails first where the package is missing
        self.path = path
        with path.open("rb") as file:
            if file.read(8) in _BIG_ENDIAN:
                raise ValueError(
                    f"{path} is a big-endian GGUF file; convert it to little-endian first"
                )
            file.seek(0)
            try:
                self._values, self.tensors = _read(path, _Stream(file))
            # Arrays of arrays can be nested as deeply as the file is long.
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path} is not a GGUF file, or was truncated: {error}") from error
        if self.get("split.count", 1) not in (0, 1):
            raise ValueError(
                f"{path} is one of {self.get('split.count')} files of a model: merge them with "
                "llama.cpp's llama-gguf-split --merge"
            )
        self.architecture = self.get("general.architecture")
        if self.architecture not in list(ARCHITECTURES):  # a list, as the value may be unhashable
            raise ValueError(
                f"{path} has architecture {self.architecture!r}, which is not supported; "
                f"supported: {sorted(ARCHITECTURES)}"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a metadata key."""
        return self._values.get(key, default)

    def of_architecture(self) -> dict[str, Any]:
        """The metadata of the architecture, with its name removed from the keys."""
        prefix = f"{self.architecture}."
        return {
            key.removeprefix(prefix): value
            for key, value in self._values.items()
            if key.startswith(prefix)
        }


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a GGUF file: shape and type of its values, and where its bytes are."""

    shape: Shape
    kind: Any
    """`gguf.GGMLQuantizationType`."""
    block: tuple[int, int]
    """Values per block and bytes per block; a block lies within a row."""
    place: TensorPlace

    @property
    def dtype(self) -> str:
        """Dtype of the values that a read returns: float32 for a quantized type."""
        return self.place.dtype if self.place.dtype in ITEM_SIZES else "F32"


class _Stream:
    """Reads the values of a GGUF file in order; ValueError where the file ends too early."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = os.fstat(file.fileno()).st_size
        self.offset = 0

    def take(self, num_bytes: int) -> bytes:
        left = self.size - self.offset
        if num_bytes > left:
            raise ValueError(
                f"{num_bytes:,} bytes should follow byte {self.offset:,}, but {left:,} do"
            )
        self.offset += num_bytes
        return self._file.read(num_bytes)

    def numbers(self, kind: str, count: int) -> list[Any]:
        dtype = np.dtype(kind)
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def number(self, kind: str) -> Any:
        return self.numbers(kind, 1)[0]

    def text(self) -> str:
        return self.take(self.number("<u8")).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.number("<u4"), self.number("<u8"))
        if kind not in _NUMBERS:
            raise ValueError(f"a value before byte {self.offset:,} has type {kind}, not 0 to 12")
        return self.number(_NUMBERS[kind])

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind], count)
        return [self.value(kind) for _ in range(count)]


def _read(path: Path, stream: _Stream) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """The metadata and the tensors of a file."""
    if stream.take(4) != b"GGUF":
        raise ValueError("it does not begin with the letters GGUF")
    version = stream.number("<u4")
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}, supported: {_VERSIONS}")
    num_tensors, num_values = stream.numbers("<u8", 2)
    values: dict[str, Any] = {}
    for _ in range(num_values):
        key = _once(stream.text(), values)
        values[key] = stream.value(stream.number("<u4"))
    places: dict[str, tuple[Shape, int, int]] = {}
    for _ in range(num_tensors):
        name = _once(stream.text(), places)
        shape = tuple(reversed(stream.numbers("<u8", stream.number("<u4"))))
        places[name] = shape, stream.number("<u4"), stream.number("<u8")
    alignment = values.get("general.alignment", gguf_library().GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0:
        raise ValueError(f"general.alignment is {alignment}; it must be a positive integer")
    start = -(-stream.offset // alignment) * alignment
    tensors = {
        name: _stored(path, shape, kind, start + offset)
        for name, (shape, kind, offset) in places.items()
    }
    for name, tensor in tensors.items():
        if (end := tensor.place.offset + tensor.place.num_bytes) > stream.size:
            raise ValueError(f"{name} should end at byte {end:,}, the file has {stream.size:,}")
    return values, tensors


def _once(name: str, seen: dict[str, Any]) -> str:
    if name in seen:
        raise ValueError(f"it has {name!r} twice")
    return name


def _stored(path: Path, shape: Shape, kind: int, offset: int) -> GgufTensor:
    gguf = gguf_library()
    tensor_type = gguf.GGMLQuantizationType(kind)
    values_per_block, block_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
    *rows, columns = shape
    if columns % values_per_block:
        raise ValueError(
            f"a row of {columns} values is not a multiple of its blocks of {values_per_block}"
        )
    num_bytes = prod(shape) // values_per_block * block_bytes
    place = TensorPlace(path, tensor_type.name, shape, offset, num_bytes)
    if tensor_type.name not in ITEM_SIZES:  # bytes of blocks
        row_bytes = columns // values_per_block * block_bytes
        place = replace(place, dtype=BYTES, shape=(*rows, row_bytes))
    return GgufTensor(shape, tensor_type, (values_per_block, block_bytes), place)
