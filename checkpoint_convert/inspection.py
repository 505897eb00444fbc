"""Describes a set of weights from file headers: `checkpoint-convert inspect`."""

from collections import Counter
from contextlib import closing
from math import prod
from pathlib import Path

from rich.console import Console
from rich.table import Table

from checkpoint_convert.formats import is_torch_dist
from checkpoint_convert.formats.safetensors_file import ITEM_SIZES, TORCH_NAMES
from checkpoint_convert.hf_config import read_shape
from checkpoint_convert.megatron import hf_tensors, megatron_layout
from checkpoint_convert.shape import ModelShape, check_divisible, named_fields, tensor_sizes
from checkpoint_convert.sidecar import model_config
from checkpoint_convert.weights import Weights, open_weights
from parallel import Coordinates, ParallelDims, Shape, divisors


def print_inspection(
    console: Console, path: Path, hf_config: Path | None, dims: ParallelDims
) -> None:
    """Print the shape of the model, what a rank of `dims` would hold, and what the files hold.

    Raises ValueError when the model is not supported, when `dims` cannot split it, or when the
    files do not hold exactly its weights.
    """
    shape = read_shape(model_config(path, hf_config))
    if is_torch_dist(path):  # only its tensors say which further parts of the model were trained
        with closing(open_weights(path, shape)) as weights:
            shape = weights.shape
    console.print(_shape_table(shape))
    check_divisible(shape, dims)
    console.print(_stage_table(shape, dims))
    with closing(open_weights(path, shape)) as weights:
        console.print(_dtype_table(weights))
        if weights.format == "torch_dist":
            console.print(_chunk_table(weights))
        console.print(
            f"{weights.format}: {len(weights.layout.shapes):,} stored tensors hold exactly the "
            f"{len(hf_tensors(shape)):,} tensors of the model"
        )


def _shape_table(shape: ModelShape) -> Table:
    table = Table("field", "value", show_header=False, box=None)
    fields = named_fields(shape)
    if tower := fields.pop("vision"):
        fields["vision"] = f"{len(tower)} tensors"
    fields["possible --tp"] = tensor_sizes(shape)
    if shape.moe is not None:
        fields["possible --ep"] = divisors(shape.moe.num_experts)
    for name, value in fields.items():
        table.add_row(name, f"{value:,}" if type(value) is int else str(value))
    return table


def _stage_table(shape: ModelShape, dims: ParallelDims) -> Table:
    """What the ranks of each pipeline stage hold; all ranks of a stage hold the same amount."""
    table = Table("pipeline stage", "layers", "parameters of a rank", "in bf16", box=None)
    for stage in range(dims.pipeline):
        at = Coordinates(tensor=0, context=0, data=0, pipeline=stage)
        layout = megatron_layout(shape, dims, at, transformer_engine=True)
        layers = sum(name.endswith("self_attention.linear_proj.weight") for name in layout.shapes)
        count = sum(prod(size) for size in layout.shapes.values())
        table.add_row(str(stage), str(layers), f"{count:,}", f"{2 * count / 1e9:,.3f} GB")
    return table


def _chunk_table(weights: Weights) -> Table:
    """How the tensors of a checkpoint are cut into chunks."""
    chunks: dict[str, Counter[Shape]] = {}
    for name, size in weights.layout.shapes.items():
        chunks.setdefault(name.partition("@")[0], Counter())[size] += 1
    table = Table("stored tensor", "chunks", box=None)
    for key, sizes in chunks.items():
        cuts = [f"{count:,} of {list(size)}" for size, count in sizes.most_common(2)]
        table.add_row(key, ", ".join(cuts) + (", ..." if len(sizes) > 2 else ""))
    return table


def _dtype_table(weights: Weights) -> Table:
    shapes = hf_tensors(weights.shape)
    counts: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for name, dtype in weights.dtypes.items():
        counts[dtype] += 1
        elements[dtype] += prod(shapes[name])
    table = Table("dtype", "tensors", "parameters", "size", box=None)
    for dtype, count in counts.items():
        size = elements[dtype] * ITEM_SIZES[dtype]
        name = TORCH_NAMES[dtype]
        table.add_row(name, f"{count:,}", f"{elements[dtype]:,}", f"{size / 1e9:,.3f} GB")
    return table
