"""Quantised weights: which scheme a folder follows, and which scale belongs to which weight.

A quantised matrix holds 8-bit numbers; each is multiplied by the scale of its block. Needs no
torch: `formats/dequantized.py` computes.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from checkpoint_convert.formats.safetensors_file import TensorPlace
from parallel import Box, Shape

MODELOPT_FILE = "hf_quant_config.json"
"""Where ModelOpt says how weights are quantised, in folders whose config.json does not."""
CONFIG_KEYS = ("quantization_config", "compression_config")
SCALE_DTYPES = ("F32", "BF16", "F16")

# The extents of a block; None: all of that dimension.
Block = tuple[int | None, int | None]
_STRATEGIES: dict[str, Block] = {"tensor": (None, None), "channel": (1, None)}
_MODELOPT = {"FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "channel"}
_COMPRESSED = {"float-quantized": ("F8_E4M3", "float"), "int-quantized": ("I8", "int")}
# What engines need beside the weights: they quantise activations, and keys and values.
_OF_ACTIVATIONS = (
    *(".input_scale", ".output_scale", ".k_scale", ".v_scale"),
    *(".input_zero_point", ".output_zero_point"),
)
_ZERO_POINT = ".weight_zero_point"
_INSTEAD = "convert the weights to bfloat16 first, and take the key out"


@dataclass(frozen=True)
class Scheme:
    """How the matrices of a folder are quantised; those of another dtype are not."""

    dtype: str
    """Of the 8-bit numbers, as safetensors names it."""
    block: Block
    """Rows and columns that share a scale."""
    suffix: str
    """Added to the name of a weight, it is the name of its scales."""
    read_as: str
    """The dtype to which products are rounded: that of the model in config.json."""

    def stored_names(self, names: Collection[str]) -> set[str]:
        """The names in the files of tensors with these names, and of their scales."""
        return {*names, *(name + self.suffix for name in names)}

    def block_in(self, shape: Shape) -> Shape:
        """The extents of a block of a matrix of this shape."""
        rows, columns = shape
        return self.block[0] or rows, self.block[1] or columns

    def grid(self, shape: Shape) -> Shape:
        """The shape of the scales of a matrix: one per block, the last of which may be partial."""
        return tuple(-(-n // size) for n, size in zip(shape, self.block_in(shape), strict=True))


Quantization = Literal["none", "fp8", "fp8_channel", "int8"]
"""Values of this project's options."""
SCHEMES = tuple(name for name in get_args(Quantization) if name != "none")
"""Those by which this project quantises, by the names of its options."""


def quantization_config(name: str, ignored: Sequence[str]) -> dict[str, Any]:
    """quantization_config of weights quantised by one of `SCHEMES`, but for the `ignored` modules.

    Engines quantise activations as they compute: those of a token as one, for FP8 in blocks those
    of each 128 columns.
    """
    if name == "fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": [*ignored],
        }
    kind = "int" if name == "int8" else "float"
    both = {"num_bits": 8, "type": kind, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**both, "strategy": "channel", "dynamic": False},
                "input_activations": {**both, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": [*ignored],
    }


@dataclass(frozen=True, slots=True)
class QuantizedPlace(TensorPlace):
    """Where a quantised matrix is stored, and where its scales are."""

    scale_name: str
    scale: TensorPlace
    """One per block, as a matrix; a block at the end may be partial."""
    block: Shape
    read_as: str

    def blocks_of(self, box: Box) -> Box:
        """The scales of the blocks into which a box of the matrix reaches."""
        first = tuple(a // size for a, size in zip(box.start, self.block, strict=True))
        end = tuple(-(-b // size) for b, size in zip(box.end, self.block, strict=True))
        return Box(first, tuple(b - a for a, b in zip(first, end, strict=True)))

    def elements_of(self, blocks: Box) -> Box:
        """The elements of some blocks."""
        start = tuple(a * size for a, size in zip(blocks.start, self.block, strict=True))
        end = tuple(
            min(b * size, n) for b, size, n in zip(blocks.end, self.block, self.shape, strict=True)
        )
        return Box(start, tuple(b - a for a, b in zip(start, end, strict=True)))


def scheme_of(path: Path, table: Mapping[str, Any], read_as: str) -> Scheme:
    """The scheme that `table` describes: quantization_config, in the file `path`.

    `read_as` is the dtype of the model in config.json, as safetensors names it. Raises ValueError,
    naming the setting, for one that is not supported.
    """
    match table.get("quant_method"):
        case "fp8":
            block = _block(path, table, "weight_block_size")
            return Scheme("F8_E4M3", block, "_scale_inv", read_as)
        case "compressed-tensors":
            dtype, block = _compressed(path, table)
            return Scheme(dtype, block, "_scale", read_as)
        case "modelopt":
            inner = _table(path, table, "quantization") or table
            _check(path, "quant_algo", inner.get("quant_algo"), _MODELOPT)
            block = _STRATEGIES[_MODELOPT[inner["quant_algo"]]]
            return Scheme("F8_E4M3", block, "_scale", read_as)
        case method:
            supported = ("fp8", "compressed-tensors", "modelopt", "mxfp4")
            _check(path, "quant_method", method, supported)
            raise AssertionError(method)


def _compressed(path: Path, table: Mapping[str, Any]) -> tuple[str, Block]:
    """Stored dtype and block of compressed-tensors' scheme for weights."""
    _check(path, "format", table.get("format"), _COMPRESSED)
    dtype, kind = _COMPRESSED[table["format"]]
    sparsity = _table(path, table, "sparsity_config").get("format", "dense")
    _check(path, "sparsity_config.format", sparsity, ("dense",))
    _check(path, "transform_config", table.get("transform_config") or {}, ({},))
    blocks: set[Block] = set()
    groups = _table(path, table, "config_groups")
    for name in groups:
        group = _table(path, groups, name)
        _check(path, f"{name}.format", group.get("format") or table["format"], (table["format"],))
        weights = {"symmetric": True, "strategy": "tensor", **_table(path, group, "weights")}
        for key, value in {"num_bits": 8, "type": kind, "symmetric": True}.items():
            _check(path, f"{name}.weights.{key}", weights.get(key), (value,))
        if weights["strategy"] == "block":
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


def with_scales(
    places: Mapping[str, TensorPlace], scheme: Scheme
) -> tuple[dict[str, TensorPlace], list[str]]:
    """The tensors without those that only quantisation needs, and what is wrong with scales.

    Quantised weights, whose scales are right, become `QuantizedPlace`.
    """
    found = {n: place for n, place in places.items() if not n.endswith(_OF_ACTIVATIONS)}
    faults = []
    for name, place in places.items():
        if name.endswith(_ZERO_POINT):
            faults.append(f"{name} in {place.file.name}: only symmetric quantisation is supported")
            del found[name]
        elif place.dtype == scheme.dtype and name in found:
            scale = found.pop(name + scheme.suffix, None)
            try:
                found[name] = _with_scale(name, place, scale, scheme)
            except ValueError as error:
                faults.append(str(error))
    return found, faults


def _with_scale(
    name: str, place: TensorPlace, scale: TensorPlace | None, scheme: Scheme
) -> QuantizedPlace:
    scale_name = name + scheme.suffix
    if scale is None:
        raise ValueError(
            f"{name} in {place.file.name} is {place.dtype}, but {scale_name} is missing"
        )
    if len(place.shape) != 2:
        raise ValueError(f"{name} in {place.file.name} is quantised, but no matrix")
    block, grid = scheme.block_in(place.shape), scheme.grid(place.shape)
    shapes: list[Shape] = [grid]
    if scheme.block[1] is None:  # a scale per tensor or row needs no second dimension
        shapes += [grid[:1], ()] if scheme.block[0] is None else [grid[:1]]
    if scale.shape not in shapes:
        raise ValueError(
            f"{scale_name} in {scale.file.name} has shape {list(scale.shape)}; blocks of "
            f"{list(block)} in a matrix of {list(place.shape)} require {list(grid)}"
        )
    if scale.dtype not in SCALE_DTYPES:
        raise ValueError(
            f"{scale_name} in {scale.file.name} has dtype {scale.dtype}, supported: "
            f"{list(SCALE_DTYPES)}"
        )
    return QuantizedPlace(
        *(place.file, place.dtype, place.shape, place.offset, place.num_bytes),
        scale_name=scale_name,
        scale=replace(scale, shape=grid),
        block=block,
        read_as=scheme.read_as,
    )
