"""Converts a Megatron-Core checkpoint to a Hugging Face folder: `checkpoint-convert export`."""

from contextlib import closing
from math import prod
from pathlib import Path

from checkpoint_convert.companions import model_config
from checkpoint_convert.formats import is_torch_dist
from checkpoint_convert.formats.hf_folder import locate_tensors
from checkpoint_convert.formats.safetensors_file import ITEM_SIZES
from checkpoint_convert.hf_config import read_shape
from checkpoint_convert.hf_writer import MAX_SHARD_BYTES, create_folder
from checkpoint_convert.megatron import hf_dtypes, hf_tensors
from checkpoint_convert.new_folder import new_folder
from checkpoint_convert.transfer import Progress, transfer
from checkpoint_convert.weights import open_weights
from parallel import Layout


def export_checkpoint(
    megatron: Path,
    out: Path,
    *,
    hf_config: Path | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    num_workers: int = 1,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write the torch_dist checkpoint `megatron` as Hugging Face folder `out`.

    `hf_config` is a folder with config.json, tokenizer and generation config; None uses those that
    the checkpoint holds. `dtype` (a safetensors name such as "BF16") converts all weights; None
    keeps the dtype of each. `out` appears only when it is complete. Raises ValueError if any
    argument is invalid.
    """
    if not is_torch_dist(megatron):
        raise ValueError(
            f"{megatron} has no .metadata: give the folder of one torch_dist checkpoint, such as "
            "checkpoints/step_100 of a run"
        )
    config = model_config(megatron, hf_config)
    with closing(open_weights(megatron, read_shape(config))) as weights:
        shapes = hf_tensors(weights.shape)
        dtypes = weights.dtypes if dtype is None else hf_dtypes(weights.shape, dtype, "F32")
        num_bytes = sum(prod(shape) * ITEM_SIZES[dtypes[name]] for name, shape in shapes.items())
        with new_folder(out, num_bytes) as folder:
            create_folder(folder, config, weights.shape, dtypes, max_shard_bytes)
            whole = Layout.of_whole_tensors(shapes)
            transfer(weights, whole, locate_tensors(folder), num_workers, progress)
