"""Converts a Megatron-Core checkpoint to a Hugging Face folder: `checkpoint-convert export`.

The folder is created with zeros for weights; several processes then fill in the values.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from math import prod
from pathlib import Path

from checkpoint_convert.formats import is_torch_dist
from checkpoint_convert.formats.safetensors_file import (
    INDEX_FILE,
    SINGLE_FILE,
    STORED_SIZES,
    TensorPlace,
    copy_tensors,
    create_file,
)
from checkpoint_convert.hf_config import read_shape
from checkpoint_convert.hf_folder import (
    check_weights,
    locate_tensors,
    other_towers,
)
from checkpoint_convert.megatron import file_layout, file_tensors, hf_dtypes, hf_tensors
from checkpoint_convert.mtp import stored_mtp_layers, transfer_all
from checkpoint_convert.new_folder import check_space, new_folder
from checkpoint_convert.quantized.model import QuantizedModel, quantized_model
from checkpoint_convert.shape import ModelShape
from checkpoint_convert.sidecar import copy_sidecar_files, main_dtype, model_config
from checkpoint_convert.transfer import write_whole_scales
from checkpoint_convert.weights import Progress, as_laid_out, in_groups, open_weights
from parallel import Shape

MAX_SHARD_BYTES = 5 * 10**9


StoredTensors = Mapping[str, tuple[str, Shape]]
"""Dtype and shape of each tensor of some weight files, by name."""


def stored_tensors(
    shape: ModelShape, dtypes: Mapping[str, str], quantized: QuantizedModel | None
) -> StoredTensors:
    """Dtype and shape of each tensor of an export; a quantised weight is followed by its scales.

    `dtypes` has the dtypes before quantisation.
    """
    stored: dict[str, tuple[str, Shape]] = {}
    of_files = {piece.local: dtypes[piece.tensor] for piece in file_layout(shape).pieces}
    for name, size in file_tensors(shape).items():
        stored[name] = of_files[name], size
        if quantized is not None and name in quantized.matrices:
            del stored[name]
            stored |= quantized.scheme.stored(name, size)
    return stored


def num_bytes_of(stored: StoredTensors) -> int:
    return sum(prod(size) * STORED_SIZES[dtype] for dtype, size in stored.values())


def create_folder(
    folder: Path,
    source_folder: Path,
    shape: ModelShape,
    dtypes: Mapping[str, str],
    max_shard_bytes: int,
    quantized: QuantizedModel | None = None,
) -> None:
    """Put weight files of zeros into `folder`, and copy the rest of the model from `source_folder`.

    Layers for multi-token prediction are zeros, too: see `checkpoint_convert.mtp`. A quantised
    export has none.

    `dtypes` gives the dtype of every tensor by name; the main one goes into config.json. A weight
    file exceeds `max_shard_bytes` only when a single tensor does. Raises ValueError when the disk
    is too full.
    """
    stored = {**stored_tensors(shape, dtypes, quantized)}
    names, towers = _towers(source_folder, quantized)
    dtype = main_dtype(hf_tensors(shape), dtypes)
    mtp = {} if quantized else _mtp_layers(source_folder, shape, dtypes, dtype)
    stored |= mtp
    # A trained vision tower is part of the model: `stored` has it, and its values are not copied.
    others = {name: place for name, place in towers.items() if name not in stored}
    stored |= {name: (place.dtype, place.shape) for name, place in others.items()}
    sizes = {name: num_bytes_of({name: each}) for name, each in stored.items()}
    needed = sum(sizes.values())
    check_space(folder, needed)
    shards = list(in_groups(sizes, sizes.__getitem__, max_shard_bytes))
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    files = files if len(files) > 1 else [SINGLE_FILE]
    for file, shard in zip(files, shards, strict=True):
        create_file(folder / file, {names.get(name, name): stored[name] for name in shard})
    if len(files) > 1:
        weight_map = {
            names.get(name, name): file
            for file, shard in zip(files, shards, strict=True)
            for name in shard
        }
        index = {"metadata": {"total_size": needed}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    copy_tensors(others, locate_tensors(folder, others))
    config = {} if quantized is None else {"quantization_config": quantized.config}
    num_mtp_layers = shape.num_mtp_layers if mtp or shape.trains_mtp else 0
    copy_sidecar_files(source_folder, folder, dtype, config, num_mtp_layers)


def _towers(
    source_folder: Path, quantized: QuantizedModel | None
) -> tuple[dict[str, str], dict[str, TensorPlace]]:
    """`other_towers` for an export; ValueError if they cannot be copied, or with `quantized`."""
    try:
        names, others = other_towers(source_folder)
    except ValueError as error:
        raise ValueError(
            f"the other towers of the model cannot be copied: {error}; give the folder of the "
            "whole model (--hf-config)"
        ) from error
    if others and quantized is not None:
        raise ValueError(
            f"quantised weights are not supported for the multimodal model in {source_folder}: "
            "leave the quantization out"
        )
    return names, others


def _mtp_layers(
    source_folder: Path, shape: ModelShape, dtypes: Mapping[str, str], dtype: str
) -> dict[str, tuple[str, Shape]]:
    try:
        return stored_mtp_layers(source_folder, shape, dtypes, dtype)
    except ValueError as error:
        raise ValueError(
            f"the model's layers for multi-token prediction cannot be copied: {error}; give the "
            "folder of the whole model, or one without files of weights (--hf-config)"
        ) from error


def export_checkpoint(
    megatron: Path,
    out: Path,
    *,
    hf_config: Path | None = None,
    dtype: str | None = None,
    quantization: str = "none",
    ignore: Sequence[str] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
    num_workers: int = 1,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write the torch_dist checkpoint `megatron` as Hugging Face folder `out`.

    `hf_config` is a folder with config.json, tokenizer and generation config; None uses the
    checkpoint's own. `dtype` (a safetensors name such as "BF16") converts all weights; None keeps
    the dtype of each. `quantization`, one of `SCHEMES`, quantises the weights of linear layers not
    in `ignore`, rounded to the main dtype first. `out` appears only when it is complete. Raises
    ValueError if any argument is invalid.
    """
    if not is_torch_dist(megatron):
        raise ValueError(
            f"{megatron} has no .metadata: give the folder of one torch_dist checkpoint, such as "
            "checkpoints/step_100 of a run"
        )
    if ignore and quantization == "none":
        raise ValueError(f"--ignore {ignore[0]} needs --quantization")
    config = model_config(megatron, hf_config)
    with closing(open_weights(megatron, read_shape(config))) as weights:
        shape, shapes = weights.shape, hf_tensors(weights.shape)
        dtypes = weights.dtypes if dtype is None else hf_dtypes(shape, dtype, "F32")
        quantized = quantized_model(quantization, shape, main_dtype(shapes, dtypes), ignore)
        num_bytes = num_bytes_of(stored_tensors(shape, dtypes, quantized))
        with new_folder(out, num_bytes) as folder:
            create_folder(folder, config, shape, dtypes, max_shard_bytes, quantized)
            layout = file_layout(shape)
            places = as_laid_out(check_weights(folder, shape), layout)
            before = 0
            if quantized is not None and quantized.scheme.whole:
                # First: `transfer` quantises blocks relative to these scales.
                before = write_whole_scales(
                    weights, layout, places, quantized.fused, num_workers, progress
                )
            transfer_all(weights, layout, places, config, folder, num_workers, progress, before)
