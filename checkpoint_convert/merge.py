"""Merges a low-rank adapter into the weights of its base: `checkpoint-convert merge`."""

from contextlib import closing
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_convert.formats.safetensors_file import ITEM_SIZES
from checkpoint_convert.formats.tensor_io import StoredTensors
from checkpoint_convert.formats.torch_dtypes import DTYPES
from checkpoint_convert.hf_config import read_shape
from checkpoint_convert.hf_folder import locate_tensors
from checkpoint_convert.megatron import file_layout, file_tensors, hf_dtypes, hf_tensors
from checkpoint_convert.megatron_to_hf import MAX_SHARD_BYTES, create_folder
from checkpoint_convert.mtp import transfer_all
from checkpoint_convert.new_folder import new_folder
from checkpoint_convert.peft import WEIGHT, StoredAdapter, a_name, b_name, read_adapter
from checkpoint_convert.weights import Progress, as_laid_out, open_weights
from parallel import Box


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + s B A, rounded once to the dtype of W; W is [out, in], A [r, in], B [out, r]."""
    # Not `b @ a`, whose order of summation depends on the shapes: rank-1 updates in float32 give
    # the same bits however ranks or processes share the weight.
    change = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    for column, row in zip(b.float().unbind(1), a.float(), strict=True):
        change += column[:, None] * row
    return (weight.float() + change * scale).to(weight.dtype)


class MergedTensors(StoredTensors):
    """The weights of a model with an adapter merged into each box as it is read."""

    def __init__(self, base: StoredTensors, adapter: StoredAdapter) -> None:
        super().__init__(adapter.places)
        self._stored, self._base, self._adapter = self.dtypes, base, adapter
        self.dtypes = base.dtypes

    def read_into(self, name: str, box: Box, target: Tensor) -> None:
        self._base.read_into(name, box, target)
        module = name.removesuffix(WEIGHT)
        if module in self._adapter.modules:
            rank, ((row, column), (rows, columns)) = self._adapter.rank, (box.start, box.size)
            # A box of the weight needs all r rows of A, but only its columns, and its rows of B.
            a = self._read(a_name(module), Box((0, column), (rank, columns)))
            b = self._read(b_name(module), Box((row, 0), (rows, rank)))
            target.copy_(merged(target, a, b, self._adapter.scale))

    def close(self) -> None:
        """Close all files, the base's included."""
        super().close()
        self._base.close()

    def _read(self, name: str, box: Box) -> Tensor:
        values = torch.empty(box.size, dtype=DTYPES[self._stored[name]])
        super().read_into(name, box, values)
        return values


def merge_adapter(
    base: Path,
    adapter: Path,
    out: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    num_workers: int = 1,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write the model in `base` as folder `out`, with the adapter of a PEFT folder merged.

    No whole tensor is held. `dtype` and `max_shard_bytes` are as in `export_checkpoint`. Raises
    ValueError if any argument is invalid.
    """
    shape = read_shape(base)
    shapes = hf_tensors(shape)
    stored = read_adapter(adapter, file_tensors(shape))
    with closing(open_weights(base, shape)) as weights:
        dtypes = weights.dtypes if dtype is None else hf_dtypes(shape, dtype, "F32")
        num_bytes = sum(prod(size) * ITEM_SIZES[dtypes[name]] for name, size in shapes.items())
        together = replace(weights, tensors=MergedTensors(weights.tensors, stored))
        with closing(together), new_folder(out, num_bytes) as folder:
            create_folder(folder, base, shape, dtypes, max_shard_bytes)
            layout = file_layout(shape)
            places = as_laid_out(locate_tensors(folder, layout.shapes), layout)
            transfer_all(together, layout, places, base, folder, num_workers, progress)
