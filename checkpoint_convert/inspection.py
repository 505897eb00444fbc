"""Describes a set of weights from file headers: `checkpoint-convert inspect`."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from math import prod
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from checkpoint_convert.folder import read_json
from checkpoint_convert.formats import is_torch_dist
from checkpoint_convert.formats.safetensors_file import ITEM_SIZES, TORCH_NAMES
from checkpoint_convert.hf_config import read_shape
from checkpoint_convert.megatron import hf_tensors, megatron_layout
from checkpoint_convert.shape import ModelShape, check_divisible, tensor_sizes
from checkpoint_convert.sidecar import model_config
from checkpoint_convert.weights import Weights, open_weights
from parallel import Coordinates, ParallelDims, Shape, divisors, pipeline_layers
from parallel.words import counted

RUN_STATE, RUN_CONFIG, RUN_MANIFEST = "trainer.json", "config.yaml", "manifest.json"
"""Files of a training run's checkpoint about the run."""
SIZES_OF_RANKS = ("tensor", "pipeline", "context", "data")


def print_inspection(
    console: Console, path: Path, hf_config: Path | None, dims: ParallelDims
) -> None:
    """Print the training run, if any; the model; the share of each rank of `dims`; and the files.

    Raises ValueError when the model is not supported, when `dims` cannot split it, or when the
    files do not hold exactly its weights.
    """
    is_of_run = is_torch_dist(path) and (path / RUN_MANIFEST).is_file()
    if is_of_run:
        _check_sizes(path)
    shape = read_shape(model_config(path, hf_config))
    if is_torch_dist(path):  # its tensors alone say whether MTP or vision was trained
        with closing(open_weights(path, shape)) as weights:
            shape = weights.shape
    if is_of_run:
        console.print(_table(_fields_of_run(path)))
    console.print(_table(_fields_of_model(shape)))
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


def _table(fields: Iterator[tuple[str, Any]]) -> Table:
    table = Table("field", "value", show_header=False, box=None)
    for name, value in fields:
        table.add_row(name, f"{value:,}" if type(value) is int else str(value))
    return table


def _fields_of_run(path: Path) -> Iterator[tuple[str, Any]]:
    """Facts about the run in its checkpoint, by the keys of the run's config."""
    record, cfg = (
        read_json(path / RUN_STATE),
        yaml.safe_load((path / RUN_CONFIG).read_text(encoding="utf-8")),
    )
    step, grpo, sizes = record["state"]["step"], cfg["grpo"], cfg["parallel"]
    yield "optimizer steps", f"{step:,} of train.num_steps {cfg['train']['num_steps']:,}"
    yield "trained on", _samples(record["cursor"], step, grpo)
    for key in ("model.path", "model.dtype", "data.path", "optimizer.optimizer", "grpo.loss_type"):
        section, _, name = key.partition(".")
        yield key, cfg[section][name]
    num_ranks = prod(sizes[f"{axis}_parallel_size"] for axis in SIZES_OF_RANKS)
    yield "saved by ranks", num_ranks
    for name, size in sizes.items():
        if name.endswith("_parallel_size") and size > 1:
            yield f"parallel.{name}", size
    files = [file for file in path.rglob("*") if file.is_file()]
    num_bytes = sum(file.stat().st_size for file in files)
    num_files = counted(len(files), "file")
    yield "on disk", f"{num_bytes / 1e9:,.3f} GB in {num_files}, with the optimizer's state"
    yield "saved with", ", ".join(f"{name} {found}" for name, found in record["versions"].items())
    yield "whole config", path / RUN_CONFIG


def _check_sizes(path: Path) -> None:
    """Raise ValueError for a file of a run's checkpoint that is missing or cut off."""
    for name, wanted in read_json(path / RUN_MANIFEST)["files"].items():
        file, num_bytes = path / name, wanted["num_bytes"]
        found = file.stat().st_size if file.is_file() else 0
        if found != num_bytes:
            raise ValueError(f"{path} is not whole: {name} has {found:,} of {num_bytes:,} bytes")


def _samples(cursor: Mapping[str, int], step: int, grpo: Mapping[str, Any]) -> str:
    """Number of completions trained on; `cursor` is the position of the next step."""
    batch = grpo["generation_batch_size"]
    of_step = batch // grpo["steps_per_generation"]
    # Later iterations over a generation repeat its completions.
    begun = batch if cursor["iteration"] else cursor["minibatch"] * of_step
    different = cursor["generation"] * batch + begun
    again = f", {step * of_step:,} with repetitions" if grpo["num_iterations"] > 1 else ""
    return f"{different:,} completions{again}, {grpo['num_generations']:,} for each prompt"


def _fields_of_model(shape: ModelShape) -> Iterator[tuple[str, Any]]:
    """The model's sizes, by the names of config.json, and how it can be split."""
    yield "model_type", shape.family
    yield "num_hidden_layers", shape.num_layers
    for name in (
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings"),
        *("rope_theta", "rope_scaling"),
    ):
        if (value := getattr(shape, name)) is not None:
            yield name, value
    if shape.window is not None:
        layers = counted(len(shape.windowed_layers), "layer")
        yield "sliding_window", f"{shape.window:,} in {layers}"
    if latent := shape.latent:
        yield "q_lora_rank", latent.query_rank
        yield "kv_lora_rank", latent.rank
        yield "v_head_dim", latent.value_dim
    if shape.indexer is not None:
        yield "index_topk", shape.indexer.topk
    if shape.linear_layers:
        yield "linear attention", f"in {counted(len(shape.linear_layers), 'layer')}"
    if moe := shape.moe:
        yield "num_experts", moe.num_experts
        yield "num_experts_per_tok", moe.experts_per_token
        yield "moe_intermediate_size", moe.intermediate_size
        if moe.shared_intermediate_size:
            yield "shared_expert_intermediate_size", moe.shared_intermediate_size
        if moe.dense_layers:
            yield "dense MLP", f"in {counted(len(moe.dense_layers), 'layer')}"
    if shape.num_mtp_layers:
        trained = ", trained" if shape.trains_mtp else ""
        yield "num_nextn_predict_layers", f"{shape.num_mtp_layers}{trained}"
    if shape.vision:
        yield "vision", f"{len(shape.vision)} tensors"
    yield "possible --tp", tensor_sizes(shape)
    if shape.moe is not None:
        yield "possible --ep", divisors(shape.moe.num_experts)


def _stage_table(shape: ModelShape, dims: ParallelDims) -> Table:
    """Table of pipeline stages; all ranks of a stage hold the same amount."""
    table = Table("pipeline stage", "layers", "parameters of a rank", "in bf16", box=None)
    for stage, chunks in enumerate(pipeline_layers(shape.num_layers, dims)):
        at = Coordinates(tensor=0, context=0, data=0, pipeline=stage)
        layout = megatron_layout(shape, dims, at, transformer_engine=True)
        layers = sum(map(len, chunks))
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
