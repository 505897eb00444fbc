"""Reads a GGUF file (llama.cpp's format) as the tensors of the Hugging Face folder it came from.

A quantized tensor is rows of blocks, each of some 32 or 256 values with their scales. To read a
box, only the blocks that it touches are read and dequantized, to float32. llama.cpp's RoPE rotates
neighbouring pairs where Hugging Face rotates the two halves of a head. For the architecture "llama"
(which includes Mistral and Mixtral) the rows of the query and key projections are therefore stored
interleaved: row i of the first and of the second half of a head as rows 2i and 2i+1. The experts of
a layer are stacked into one tensor.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from math import pi, prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from checkpoint_convert.formats.gguf_header import (
    ARCHITECTURES,
    BYTES,
    GgufHeader,
    GgufTensor,
    gguf_library,
)
from checkpoint_convert.formats.tensor_io import StoredTensors, TensorSource
from checkpoint_convert.formats.values import WORDS, Words, floats
from checkpoint_convert.megatron import hf_tensors
from checkpoint_convert.shape import ModelShape
from parallel import Box

ROPE_FACTORS = "rope_freqs.weight"
_WITH_ROWS_PAIRED = "llama"
_PAIRED_ROWS = re.compile(r"\.self_attn\.[qk]_proj\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# Bytes of values that are dequantized or reordered at a time.
_SLICE_BYTES = 1 << 20
_OTHER_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def find_gguf(path: Path) -> Path | None:
    """The .gguf file at `path`, or the only weight file in the folder `path`; None: not a GGUF."""
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    found = sorted(path.glob("*.gguf"))
    if not found or any(any(path.glob(pattern)) for pattern in _OTHER_WEIGHTS):
        return None
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"{path} has {len(found)} GGUF files, give the path of one: {names}")
    return found[0]


class GgufTensors(TensorSource):
    """The tensors of a GGUF file, with the names, shapes and row order of the Hugging Face model.

    Raises ValueError that lists all tensors of the model that are missing or have another shape or
    a type that cannot be dequantized, and all tensors that are not part of the model.
    """

    def __init__(self, path: str | Path, shape: ModelShape) -> None:
        header = GgufHeader(Path(path))
        if shape.family not in ARCHITECTURES[header.architecture]:
            raise ValueError(
                f"{path} has architecture {header.architecture!r}, the config says {shape.family}"
            )
        self.shapes = hf_tensors(shape)
        stored_names = _stored_names(header.architecture, shape)
        faults = [*_faults(header, shape, stored_names), *_rope_faults(header, shape)]
        if faults:
            raise ValueError(
                f"the tensors of {path} do not match the model:\n  " + "\n  ".join(faults)
            )
        self._stored = {
            name: _expert(header.tensors[stored_names[name]], name) for name in self.shapes
        }
        self.dtypes = {name: stored.dtype for name, stored in self._stored.items()}
        self._bytes = StoredTensors({name: stored.place for name, stored in self._stored.items()})
        self._is_paired = header.architecture == _WITH_ROWS_PAIRED
        self._head_dim = shape.head_dim

    def read(self, name: str, box: Box) -> Words:
        """The words of `box` of a tensor, in its dtype; shape `box.size`."""
        words: Words = np.empty(box.size, WORDS[self.dtypes[name]])
        self.read_into(name, box, words)
        return words

    def read_into(self, name: str, box: Box, target: Words) -> None:
        """Put the words of `box` into `target`: directly, or some rows at a time."""
        is_paired = self._is_paired and _PAIRED_ROWS.search(name) is not None
        if self._stored[name].place.dtype != BYTES and not is_paired:
            self._bytes.read_into(name, box, target)
            return
        # Interleaved rows are read by whole heads: a part of a head costs as much.
        unit = self._head_dim if is_paired else 1
        row_bytes = prod(box.size[1:]) * target.itemsize
        num_rows = max(1, _SLICE_BYTES // (unit * row_bytes)) * unit
        for first in range(0, box.size[0], num_rows):
            rows = box.narrowed(0, first, min(num_rows, box.size[0] - first))
            wide = _widened(rows, 0, unit)
            wide = _widened(wide, -1, self._stored[name].block[0])
            values = self._read_blocks(name, wide)
            if is_paired:
                values = _halves(values, self._head_dim)
            within = rows.moved(wide.start, (0,) * len(wide.start))
            target[first : first + rows.size[0]] = values[within.slices]

    def _read_blocks(self, name: str, box: Box) -> Words:
        """The words of a box of whole blocks, in file order."""
        stored = self._stored[name]
        if stored.place.dtype != BYTES:
            return self._bytes.read(name, box)
        values_per_block, block_bytes = stored.block
        start, size = (
            (*whole[:-1], whole[-1] // values_per_block * block_bytes)
            for whole in (box.start, box.size)
        )
        blocks = self._bytes.read(name, Box(start, size))
        values: NDArray[Any] = gguf_library().dequantize(blocks, stored.kind)
        return values.view(WORDS["F32"])

    def close(self) -> None:
        """Close the file."""
        self._bytes.close()


def rope_factors(header: GgufHeader) -> NDArray[Any]:
    """The factors by which a file divides the RoPE frequencies: its tensor ROPE_FACTORS."""
    place = header.tensors[ROPE_FACTORS].place
    with StoredTensors({ROPE_FACTORS: place}) as stored:
        return floats(stored.read(ROPE_FACTORS, Box.whole(place.shape)), place.dtype)


def llama3_rope_factors(factor: float, theta: float, head_dim: int) -> NDArray[Any]:
    """The factors by which Llama 3 divides the RoPE frequencies; GGUF files store them as a tensor.

    Wavelengths longer than the original context of 8,192 are stretched by `factor`, those shorter
    than a quarter of it not at all; in between the frequency is interpolated.
    """
    wavelengths = 2 * pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = ((8192 / wavelengths - 1.0) / (4.0 - 1.0)).clip(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _stored_names(architecture: str, shape: ModelShape) -> dict[str, str]:
    """Name in the file of every model tensor; all experts of a layer share one stored tensor."""
    gguf = gguf_library()
    (number,) = [arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    names = gguf.get_tensor_name_map(number, shape.num_layers)
    return {
        name: names.get_name(_EXPERT.sub(".experts.", name), try_suffixes=(".weight", ".bias"))
        for name in hf_tensors(shape)
    }


def _faults(header: GgufHeader, shape: ModelShape, stored_names: dict[str, str]) -> Iterator[str]:
    """Tensors that are missing or unexpected, or have the wrong shape or type."""
    checked = set()
    for name, size in hf_tensors(shape).items():
        stored_name = stored_names[name]
        if stored_name in checked:  # another expert of a stack
            continue
        checked.add(stored_name)
        wanted = (shape.moe.num_experts, *size) if shape.moe and _EXPERT.search(name) else size
        if stored_name not in header.tensors:
            yield f"{stored_name} {list(wanted)} is missing"
            continue
        stored = header.tensors[stored_name]
        if stored.shape != wanted:
            yield (
                f"{stored_name} has shape {list(stored.shape)}, the config requires {list(wanted)}"
            )
        elif not _can_be_read(stored):
            yield f"{stored_name} has type {stored.kind.name}, which cannot be dequantized"
    for stored_name, stored in header.tensors.items():
        if stored_name not in checked and stored_name != ROPE_FACTORS:
            yield f"{stored_name} {list(stored.shape)} is not part of the model"


def _can_be_read(stored: GgufTensor) -> bool:
    gguf = gguf_library()
    if stored.place.dtype != BYTES:
        return True
    block = np.zeros((1, stored.block[1]), np.uint8)
    try:
        gguf.dequantize(block, stored.kind)
    except NotImplementedError:
        return False
    return True


def _rope_faults(header: GgufHeader, shape: ModelShape) -> Iterator[str]:
    """Check that the RoPE scaling of Llama 3 in the file's tensor and in the config agree.

    llama.cpp reads it from the tensor; we read it from the config. A file without the tensor, from
    before llama.cpp supported that scaling, computes another model.
    """
    scaling = shape.rope_scaling or {}
    factor = scaling["factor"] if scaling.get("rope_type") == "llama3" else 1.0
    wanted = llama3_rope_factors(factor, shape.rope_theta, shape.head_dim)
    has_factors = ROPE_FACTORS in header.tensors
    factors = rope_factors(header) if has_factors else np.ones(shape.head_dim // 2)
    if factors.shape != wanted.shape or not np.allclose(factors, wanted, rtol=1e-4):
        found = f"scales RoPE by up to {factors.max():g}" if has_factors else "is missing"
        yield (
            f"{ROPE_FACTORS} {found}, the config requires "
            f"{shape.rope_scaling or 'no scaling of RoPE'}"
        )


def _expert(stored: GgufTensor, name: str) -> GgufTensor:
    """The slice of a stack of experts that is the tensor `name`; any other tensor unchanged."""
    match = _EXPERT.search(name)
    if match is None:
        return stored
    place = stored.place
    num_bytes = place.num_bytes // place.shape[0]
    offset = place.offset + int(match[1]) * num_bytes
    return replace(
        stored,
        shape=stored.shape[1:],
        place=replace(place, shape=place.shape[1:], offset=offset, num_bytes=num_bytes),
    )


def _widened(box: Box, dim: int, unit: int) -> Box:
    """The smallest box around `box` that starts and ends at multiples of `unit` along `dim`."""
    first = box.start[dim] // unit * unit
    end = -(-box.end[dim] // unit) * unit
    return box.narrowed(dim % len(box.size), first - box.start[dim], end - first)


def _halves(words: Words, head_dim: int) -> Words:
    """Reorder the rows of whole heads: from neighbours that rotate together to halves that do."""
    pairs = words.reshape(-1, head_dim // 2, 2, *words.shape[1:])
    return pairs.swapaxes(1, 2).reshape(words.shape)
