"""Layers for multi-token prediction (MTP): an export keeps the source's layers.

They are draft models for speculative decoding, and lie behind the last layer of the model or apart
from it. Only a layer that is part of the model is trained: see `ModelShape.trains_mtp`. Their
copies of embedding and head are exported too; engines use the model's.
"""

import re
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from checkpoint_convert.formats.safetensors_file import TensorPlace
from checkpoint_convert.hf_folder import mtp_tensors
from checkpoint_convert.quantized.numbers import DequantizedTensors
from checkpoint_convert.shape import ModelShape
from checkpoint_convert.transfer import num_bytes_of, transfer
from checkpoint_convert.weights import Progress, Weights
from parallel import Layout, Shape

_LAYER = re.compile(r"^(model|mtp)\.layers\.\d+\.")


def stored_mtp_layers(
    source: Path, shape: ModelShape, dtypes: Mapping[str, str], main_dtype: str
) -> dict[str, tuple[str, Shape]]:
    """Dtype and shape of each MTP tensor in an export whose other tensors have `dtypes`.

    A tensor takes the dtype of its namesake in the last layer, or else `main_dtype`.
    """
    last = f"model.layers.{shape.num_layers - 1}."
    stored = {}
    for name, place in mtp_tensors(source, shape).items():
        own_name = _LAYER.sub("", name)
        stored[name] = dtypes.get(last + own_name, main_dtype), place.shape
    return stored


def open_mtp_layers(source: Path, shape: ModelShape, folder: Path) -> Weights:
    """MTP layers of `source` for which an export `folder` has room."""
    room = mtp_tensors(folder, shape)
    places = mtp_tensors(source, shape) if room else {}
    layout = Layout.of_whole_tensors({name: place.shape for name, place in room.items()})
    return Weights(shape, layout, DequantizedTensors({name: places[name] for name in room}), "")


def transfer_all(
    weights: Weights,
    layout: Layout,
    places: Mapping[str, TensorPlace],
    source: Path,
    folder: Path,
    num_workers: int,
    progress: Progress,
    before: int = 0,
) -> None:
    """`transfer` the weights into an export `folder`, then the MTP layers of `source`.

    `before`: bytes that `progress` has counted already.
    """
    room = mtp_tensors(folder, weights.shape)
    further = before + num_bytes_of(places)
    total = further + num_bytes_of(room)
    transfer(
        *(weights, layout, places, num_workers), lambda done, _: progress(before + done, total)
    )
    if room:
        with closing(open_mtp_layers(source, weights.shape, folder)) as mtp:
            transfer(
                *(mtp, mtp.layout, room, num_workers),
                lambda done, _: progress(further + done, total),
            )
