"""Creates Hugging Face folders that are complete except for the values of their weights."""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path

from checkpoint_convert.companions import copy_companions, main_dtype
from checkpoint_convert.formats.hf_folder import INDEX_FILE, SINGLE_FILE
from checkpoint_convert.formats.safetensors_file import ITEM_SIZES, create_file
from checkpoint_convert.megatron import hf_tensors
from checkpoint_convert.new_folder import check_space
from checkpoint_convert.shape import ModelShape

MAX_SHARD_BYTES = 5 * 10**9


def create_folder(
    folder: Path,
    source_folder: Path,
    shape: ModelShape,
    dtypes: Mapping[str, str],
    max_shard_bytes: int,
) -> None:
    """Put weight files of zeros into `folder`, and copy the rest of the model from `source_folder`.

    `dtypes` gives the dtype of every tensor by name; the main one goes into config.json. A weight
    file exceeds `max_shard_bytes` only when a single tensor does. Raises ValueError when the disk
    is too full.
    """
    shapes = hf_tensors(shape)
    sizes = {name: prod(size) * ITEM_SIZES[dtypes[name]] for name, size in shapes.items()}
    needed = sum(sizes.values())
    check_space(folder, needed)
    shards = _shards(sizes, max_shard_bytes)
    files = _file_names(len(shards))
    for file, names in zip(files, shards, strict=True):
        create_file(folder / file, {name: (dtypes[name], shapes[name]) for name in names})
    if len(files) > 1:
        weight_map = {n: file for file, names in zip(files, shards, strict=True) for n in names}
        index = {"metadata": {"total_size": needed}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    copy_companions(source_folder, folder, main_dtype(shapes, dtypes))


def _shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Group the tensors, in order, into files of at most `max_bytes`, or of one larger tensor."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
