"""Weights from a Hugging Face folder into one rank's tensors, reading only that rank's boxes."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_convert.hf_folder import check_weights
from checkpoint_convert.megatron import hf_tensors
from checkpoint_convert.shape import ModelShape
from checkpoint_convert.tensor_io import read_box
from parallel import Copy, Layout, intersect


@torch.no_grad()
def read_weights(
    folder: str | Path, shape: ModelShape, layout: Layout, parameters: Mapping[str, Tensor]
) -> None:
    """Fill every element of `parameters`, the local tensors that `layout` describes, in place.

    Values are converted to the dtype and device of each parameter. Raises the ValueError of
    `check_weights` when the folder does not hold the model.
    """
    layout.check_shapes({name: tuple(tensor.shape) for name, tensor in parameters.items()})
    layout.check_complete()
    places = check_weights(folder, shape)
    by_file: dict[Path, list[Copy]] = defaultdict(list)
    for copy in intersect(Layout.of_whole_tensors(hf_tensors(shape)), layout):
        by_file[places[copy.source].file].append(copy)
    for file, copies in by_file.items():
        with file.open("rb", buffering=0) as opened:
            for copy in copies:
                values = read_box(opened.fileno(), places[copy.source], copy.source_box)
                parameters[copy.destination][copy.destination_box.slices].copy_(values)
    for local, box in layout.zeros:
        parameters[local][box.slices].zero_()
