"""Converts a Hugging Face model to a Megatron-Core checkpoint: `checkpoint-convert import`.

Chunks and files are planned first, without reading a weight.
"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from checkpoint_convert.formats.safetensors_file import ITEM_SIZES
from checkpoint_convert.formats.torch_dist_writer import (
    Chunk,
    create_chunks,
    finish_checkpoint,
    index_of,
)
from checkpoint_convert.hf_config import read_shape
from checkpoint_convert.megatron import (
    checkpoint_boxes,
    checkpoint_layout,
    extra_states,
    hf_dtypes,
    hf_tensors,
)
from checkpoint_convert.new_folder import new_folder
from checkpoint_convert.shape import ModelShape, check_divisible, padded_vocab_size
from checkpoint_convert.sidecar import (
    CHECKPOINT_FOLDER,
    copy_sidecar_files,
    main_dtype,
    model_config,
)
from checkpoint_convert.transfer import transfer
from checkpoint_convert.weights import Progress, in_groups, open_weights
from parallel import Box, Layout, ParallelDims, ShardMapping, cover_exactly

# Megatron-Core and other loaders read chunks whole, so they should not be large.
MAX_CHUNK_BYTES = 64 << 20
FILE_BYTES = 1 << 30


@dataclass(frozen=True)
class ImportPlan:
    """The chunks of a checkpoint, grouped by file, in the order of the tensors in the model."""

    files: list[list[Chunk]]
    layout: Layout
    """Maps chunks to boxes of the Hugging Face tensors."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, including the padding of the vocabulary."""
        return sum(chunk.num_bytes for file in self.files for chunk in file)


def plan_import(shape: ModelShape, dims: ParallelDims, dtypes: Mapping[str, str]) -> ImportPlan:
    """Cut the model as the ranks of `dims` hold it, then into chunks of at most MAX_CHUNK_BYTES.

    `dtypes` maps the Hugging Face tensors to safetensors dtype names. Raises ValueError when `dims`
    cannot split the model, or when tensors that Megatron-Core stores as one differ in dtype.
    """
    check_divisible(shape, dims)
    whole = checkpoint_layout(shape, padded_vocab_size(shape, dims))
    key_dtypes = _key_dtypes(whole, dtypes)
    chunks = [
        Chunk(key, part, whole.shapes[key], key_dtypes[key])
        for owned in checkpoint_boxes(shape, dims)
        for key, box in owned
        for part in box.cut(MAX_CHUNK_BYTES // ITEM_SIZES[key_dtypes[key]])
    ]
    layout = Layout(
        {chunk.name: chunk.box.size for chunk in chunks},
        tuple(ShardMapping(c.name, Box.whole(c.box.size), c.key, c.box) for c in chunks),
    ).compose(whole)
    cover_exactly(hf_tensors(shape), [layout])
    in_order = _in_reading_order(chunks, layout)
    return ImportPlan([*in_groups(in_order, lambda chunk: chunk.num_bytes, FILE_BYTES)], layout)


def _key_dtypes(whole: Layout, dtypes: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for piece in whole.pieces:
        dtype = dtypes[piece.tensor]
        if found.setdefault(piece.local, dtype) != dtype:
            raise ValueError(
                f"{piece.tensor} is {dtype}, but others that Megatron-Core stacks or fuses with it "
                f"are {found[piece.local]}: choose one with --dtype"
            )
    return found


def _in_reading_order(chunks: list[Chunk], layout: Layout) -> list[Chunk]:
    """Sort chunks so that all chunks of one tensor, of any rank, are adjacent.

    Column shards of a matrix share pages of its file, which are then read once.
    """
    number: dict[str, int] = {}
    first: dict[str, int] = {}
    for piece in layout.pieces:
        first.setdefault(piece.local, number.setdefault(piece.tensor, len(number)))
    return sorted(chunks, key=lambda chunk: first.get(chunk.name, -1))  # -1: only padding


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
    tokenizer; None: `hf`. `dtype` (a safetensors name such as "BF16") converts all weights; None
    keeps the dtype of each. `out` appears only when it is complete. Raises ValueError if the model,
    `dims` or `out` is invalid.
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
