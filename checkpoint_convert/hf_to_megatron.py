"""Converts a Hugging Face model to a Megatron-Core checkpoint: `checkpoint-convert import`."""

from contextlib import closing
from pathlib import Path

from checkpoint_convert.formats.torch_dist_writer import create_chunks, finish_checkpoint, index_of
from checkpoint_convert.hf_config import read_shape
from checkpoint_convert.megatron import extra_states, hf_dtypes, hf_tensors
from checkpoint_convert.new_folder import new_folder
from checkpoint_convert.sidecar import (
    CHECKPOINT_FOLDER,
    copy_sidecar_files,
    main_dtype,
    model_config,
)
from checkpoint_convert.transfer import transfer
from checkpoint_convert.weights import Progress, open_weights, plan_import
from parallel import ParallelDims


def import_checkpoint(
    hf: Path,
    out: Path,
    dims: ParallelDims,
    *,
    hf_config: Path | None = None,
    dtype: str | None = None,
    num_workers: int = 1,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write the Hugging Face model `hf`, a folder, as torch_dist checkpoint `out`.

    The checkpoint loads at any layout. Each rank of `dims` finds its parts as separate chunks, and
    so do ranks with other pipeline and expert sizes. `hf_config` is the folder with config.json and
    tokenizer; None uses those of `hf`. `dtype` (a safetensors name such as "BF16") converts all
    weights; None keeps the dtype of each. `out` appears only when it is complete. Raises ValueError
    if the model, `dims` or `out` is invalid.
    """
    config = model_config(hf, hf_config)
    with closing(open_weights(hf, read_shape(config))) as weights:
        shapes = hf_tensors(weights.shape)
        dtypes = weights.dtypes if dtype is None else hf_dtypes(weights.shape, dtype, "F32")
        plan = plan_import(weights.shape, dims, dtypes)
        with new_folder(out, plan.num_bytes) as folder:
            sidecar = folder / CHECKPOINT_FOLDER
            sidecar.mkdir()
            copy_sidecar_files(config, sidecar, main_dtype(shapes, dtypes))
            chunks = create_chunks(folder, plan.files)
            places = {created.chunk.name: created.place for created in chunks}
            transfer(weights, plan.layout, places, num_workers, progress)
            finish_checkpoint(folder, index_of(chunks, extra_states(weights.shape)))
