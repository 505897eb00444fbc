"""Layers for multi-token prediction (MTP): an export has those of its source, value by value.

They are draft models for speculative decoding, lie behind the last layer of the model, and are not
trained. The copies of the embedding and of the head that are stored with them stay as well; engines
use those of the model instead.
"""

from contextlib import closing
from pathlib import Path

from checkpoint_convert.formats.dequantized import DequantizedTensors
from checkpoint_convert.formats.hf_folder import mtp_tensors
from checkpoint_convert.shape import ModelShape
from checkpoint_convert.transfer import transfer
from checkpoint_convert.weights import Progress, Weights
from parallel import Layout


def open_mtp_layers(source: Path, shape: ModelShape, folder: Path) -> Weights:
    """Those in `source` that an export `folder` has room for."""
    room, places = mtp_tensors(folder, shape), mtp_tensors(source, shape)
    layout = Layout.of_whole_tensors({name: place.shape for name, place in room.items()})
    return Weights(shape, layout, DequantizedTensors({name: places[name] for name in room}), "")


def copy_mtp_layers(
    source: Path, shape: ModelShape, folder: Path, num_workers: int, progress: Progress
) -> None:
    """Write them into an export, with several processes."""
    with closing(open_mtp_layers(source, shape, folder)) as weights:
        if weights.layout.shapes:
            places = mtp_tensors(folder, shape)
            transfer(weights, weights.layout, places, num_workers, progress)
