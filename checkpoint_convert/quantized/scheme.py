"""Quantised weights: which scheme a folder follows, and which scale belongs to which weight.

A quantised matrix holds numbers of 8 or 4 bits; each is multiplied by the scale of its block. NVFP4
scales are FP8 numbers, relative to a scale of the whole matrix; MXFP4 scales are powers of two.
Needs no torch: `numbers.py` computes.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from parallel import Shape

MODELOPT_FILE = "hf_quant_config.json"
"""ModelOpt's quantisation config, in folders whose config.json has none."""
CONFIG_KEYS = ("quantization_config", "compression_config")
REGEX = "re:"
"""Prefix of a module pattern that is a regular expression."""
DEEPSEEK_SUFFIX = "_scale_inv"
SCALE_DTYPES = ("F32", "BF16", "F16")
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
"""Suffixes to the name of a stack: its numbers, and their scales."""
MXFP4_BLOCK = 32
"""Numbers of MXFP4 that share a scale."""

# The extents of a block; None: all of that dimension.
Block = tuple[int | None, int | None]
_STRATEGIES: dict[str, Block] = {"tensor": (None, None), "channel": (1, None)}
_NVFP4_BLOCK = (1, 16)
_MODELOPT: dict[str, Block] = {
    "FP8": _STRATEGIES["tensor"],
    "FP8_PER_CHANNEL_PER_TOKEN": _STRATEGIES["channel"],
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4"), _NVFP4_BLOCK),
}
_8_BITS = {"num_bits": 8, "symmetric": True}
_4_BITS = {"num_bits": 4, "symmetric": True, "strategy": "tensor_group", "group_size": 16}
# Formats of compressed-tensors: the stored dtype, and required settings of weights.
_COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "float-quantized": ("F8_E4M3", {**_8_BITS, "type": "float"}),
    "int-quantized": ("I8", {**_8_BITS, "type": "int"}),
    "nvfp4-pack-quantized": ("U8", {**_4_BITS, "type": "float"}),
}
_LATER_EXPERT = re.compile(r"\.experts\.[1-9]")
_INSTEAD = "convert the weights to bfloat16 first, and take the key out"


@dataclass(frozen=True)
class Scheme:
    """How the matrices of a folder that have dtype `dtype` are quantised."""

    dtype: str
    """Dtype of the numbers, as safetensors names it; U8: a byte is two of 4 bits (E2M1)."""
    block: Block
    """Rows and columns that share a scale."""
    suffix: str
    """Suffix to the name of a weight: its scales."""
    read_as: str
    """Dtype to which products are rounded: the model's in config.json."""
    numbers: str = ""
    """Suffix to the name of a weight: its numbers."""
    whole: str = ""
    """Suffix to the name of a weight: the scale of the whole matrix, to which block scales are
    relative; empty: there is none."""
    divides: bool = True
    """Whether block scales are divided by the scale of the matrix; otherwise multiplied."""
    is_either: bool = False
    """Whether scales may also have the suffix of DeepSeek's files."""

    @property
    def per_byte(self) -> int:
        """Numbers per byte."""
        return 2 if self.dtype == "U8" else 1

    @property
    def scale_dtypes(self) -> tuple[str, ...]:
        """Allowed dtypes of block scales; they are written in the first."""
        return ("F8_E4M3",) if self.whole else SCALE_DTYPES

    def scale_names(self, weight: str) -> list[str]:
        """Names of the scales of its blocks and, if there is one, of the whole matrix."""
        return [weight + self.suffix, *([weight + self.whole] if self.whole else [])]

    @property
    def cut(self) -> dict[str, Shape]:
        """Tensors that a rank has for a matrix: rows and columns per element, by suffix."""
        scales = {self.suffix: (self.block[0] or 1, self.block[1] or 1)} if self.whole else {}
        return {self.numbers: (1, self.per_byte), **scales}

    def stored_names(self, names: Collection[str]) -> set[str]:
        """Possible names in the files of these tensors, their numbers and their scales."""
        scales = (scale for name in names for scale in self.scale_names(name))
        others = (name + DEEPSEEK_SUFFIX for name in names if self.is_either)
        return {*names, *(name + self.numbers for name in names), *scales, *others}

    def stored(self, name: str, shape: Shape) -> dict[str, tuple[str, Shape]]:
        """Dtype and shape of each stored tensor of a quantised matrix."""
        rows, columns = shape
        of_blocks, *whole = self.scale_names(name)
        return {
            name + self.numbers: (self.dtype, (rows, columns // self.per_byte)),
            of_blocks: (self.scale_dtypes[0], self.grid(shape)),
            **dict.fromkeys(whole, ("F32", (1,))),
        }

    def block_in(self, shape: Shape) -> Shape:
        """The extents of a block of a matrix of this shape."""
        rows, columns = shape
        return self.block[0] or rows, self.block[1] or columns

    def grid(self, shape: Shape) -> Shape:
        """The shape of the scales of a matrix: one per block, the last of which may be partial."""
        return tuple(-(-n // size) for n, size in zip(shape, self.block_in(shape), strict=True))


@dataclass(frozen=True)
class Mxfp4Scheme:
    """How the experts of gpt-oss are quantised; other tensors are not.

    In place of a stack of matrices `x` [experts, inputs, outputs], files have `x_blocks` [experts,
    outputs, inputs / 32, 16], bytes of two numbers, and `x_scales` [experts, outputs, inputs / 32],
    exponents plus 127.
    """

    read_as: str
    """Dtype of the dequantised numbers: the model's in config.json."""

    def stored_names(self, names: Collection[str]) -> set[str]:
        """Possible names in the files of these tensors."""
        return {*names, *(name + end for name in names for end in (MXFP4_BLOCKS, MXFP4_SCALES))}


def quantization_table(config: Mapping[str, Any]) -> Any:
    """Value of the first of `CONFIG_KEYS` that config.json has, as engines read it; or None."""
    return next((config[key] for key in CONFIG_KEYS if config.get(key)), None)


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Whether config.json says that its weights are in MXFP4."""
    table = quantization_table(config)
    return isinstance(table, dict) and table.get("quant_method") == "mxfp4"


EngineQuantization = Literal["none", "fp8", "fp8_channel", "int8"]
"""Quantisation options of engines, into which quantised weights can be pushed."""
Quantization = Literal[EngineQuantization, "nvfp4"]
"""Quantisation options of exported folders."""
ENGINE_SCHEMES = tuple(name for name in get_args(EngineQuantization) if name != "none")
SCHEMES = tuple(name for name in get_args(Quantization) if name != "none")
"""Schemes of this project, by the names of its options."""


def quantization_config(name: str, ignored: Sequence[str]) -> dict[str, Any]:
    """quantization_config of weights quantised by one of `SCHEMES`, except the `ignored` modules.

    Engines quantise activations as they compute: a scale per token, for FP8 in blocks also per 128
    columns, for NVFP4 none.
    """
    if name == "fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": [*ignored],
        }
    formats = {
        "fp8_channel": "float-quantized",
        "int8": "int-quantized",
        "nvfp4": "nvfp4-pack-quantized",
    }
    _, both = _COMPRESSED[formats[name]]
    weights, activations = {**both, "strategy": "channel", "dynamic": False}, None
    if name == "nvfp4":
        weights |= {"strategy": both["strategy"], "scale_dtype": "torch.float8_e4m3fn"}
    else:
        activations = {**both, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": formats[name],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [*ignored],
    }


def engine_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Shorten a `quantization_config` for a command line: Linux limits an argument to 128 KiB."""
    # A layer's experts are ignored all or none, so expert 0 stands for all: vLLM and SGLang look up
    # its name, or a name that contains the layer's.
    key = _ignoring(config)
    return {**config, key: [name for name in config[key] if not _LATER_EXPERT.search(name)]}


def ignored_modules(config: Mapping[str, Any]) -> list[str]:
    """Modules that a `quantization_config` or `engine_config` ignores, for `quantized_model`."""
    first, any_expert = ".experts.0.", r"\.experts\.\d+\."
    return [
        f"{REGEX}{any_expert.join(map(re.escape, name.split(first)))}$" if first in name else name
        for name in config[_ignoring(config)]
    ]


def _ignoring(config: Mapping[str, Any]) -> str:
    return "ignore" if "ignore" in config else "modules_to_not_convert"


def scheme_of(path: Path, table: Mapping[str, Any], read_as: str) -> Scheme:
    """The scheme that `table`, the quantization_config in the file `path`, describes.

    `read_as` is the dtype of the model in config.json, as safetensors names it. Raises ValueError
    that names an unsupported setting.
    """
    match table.get("quant_method"):
        case "fp8" if table.get("weight_block_size") is None:
            return Scheme("F8_E4M3", _STRATEGIES["tensor"], "_scale", read_as, is_either=True)
        case "fp8":
            block = _block(path, table, "weight_block_size")
            return Scheme("F8_E4M3", block, DEEPSEEK_SUFFIX, read_as)
        case "compressed-tensors":
            dtype, block = _compressed(path, table)
            if dtype == "U8":
                return Scheme(dtype, block, "_scale", read_as, "_packed", "_global_scale")
            return Scheme(dtype, block, "_scale", read_as)
        case "modelopt":
            # hf_quant_config.json nests the settings; config.json does not.
            inner = _table(path, table, "quantization") or table
            _check(path, "quant_algo", inner.get("quant_algo"), _MODELOPT)
            block = _MODELOPT[inner["quant_algo"]]
            if block == _NVFP4_BLOCK:
                _check(path, "group_size", inner.get("group_size") or 16, (16,))
                return Scheme("U8", block, "_scale", read_as, "", "_scale_2", divides=False)
            return Scheme("F8_E4M3", block, "_scale", read_as)
        case method:
            supported = ("fp8", "compressed-tensors", "modelopt", "mxfp4")
            _check(path, "quant_method", method, supported)
            raise AssertionError(method)


def _compressed(path: Path, table: Mapping[str, Any]) -> tuple[str, Block]:
    """Stored dtype and block of compressed-tensors' scheme for weights."""
    _check(path, "format", table.get("format"), _COMPRESSED)
    dtype, required = _COMPRESSED[table["format"]]
    sparsity = _table(path, table, "sparsity_config").get("format", "dense")
    _check(path, "sparsity_config.format", sparsity, ("dense",))
    _check(path, "transform_config", table.get("transform_config") or {}, ({},))
    blocks: set[Block] = set()
    groups = _table(path, table, "config_groups")
    for name in groups:
        group = _table(path, groups, name)
        _check(path, f"{name}.format", group.get("format") or table["format"], (table["format"],))
        weights = {"symmetric": True, "strategy": "tensor", **_table(path, group, "weights")}
        for key, value in required.items():
            _check(path, f"{name}.weights.{key}", weights.get(key), (value,))
        if "strategy" in required:
            blocks.add(_NVFP4_BLOCK)
        elif weights["strategy"] == "block":
            blocks.add(_block(path, weights, "block_structure"))
        else:
            _check(path, f"{name}.weights.strategy", weights["strategy"], (*_STRATEGIES, "block"))
            blocks.add(_STRATEGIES[weights["strategy"]])
    if len(blocks) != 1:
        raise ValueError(
            f"{path}: config_groups quantises weights in {len(blocks)} ways, only one is "
            f"supported: {_INSTEAD}"
        )
    return dtype, blocks.pop()


def _table(path: Path, values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {key} is {value!r}; it must be an object: {_INSTEAD}")
    return value


def _block(path: Path, table: Mapping[str, Any], key: str) -> Block:
    match table.get(key):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case value:
            raise ValueError(
                f"{path}: {key} is {value!r}; it must be the rows and columns of a block, such as "
                "[128, 128]"
            )


def _check(path: Path, key: str, value: object, supported: Iterable[object]) -> None:
    if value not in list(supported):  # a list, as a JSON value may be unhashable
        named = " and ".join(map(repr, supported))
        raise ValueError(
            f"{path}: weights are quantised with {key} {value!r}, supported: {named}: {_INSTEAD}"
        )
