"""Reads weights from files into the parameters of a rank."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_convert.formats.torch_words import DTYPE_NAMES, words_of
from checkpoint_convert.shape import ModelShape
from checkpoint_convert.weights import ShardLoader, open_weights
from parallel import Layout


def read_weights(
    path: Path, shape: ModelShape, layout: Layout, parameters: Mapping[str, Tensor]
) -> None:
    """Fill every element of `parameters`, the local tensors that `layout` describes, in place.

    Values are converted to the dtype and device of each parameter. Raises the ValueError of
    `open_weights` when the files at `path` do not hold the requested tensors. In a Hugging Face
    folder only the files with those tensors are opened: otherwise a job of a thousand ranks would
    read the header of every file a thousand times.
    """
    layout.check_shapes({name: tuple(tensor.shape) for name, tensor in parameters.items()})
    names = {piece.tensor for piece in layout.pieces}
    with closing(open_weights(path, shape, names)) as weights:
        assembly = ShardLoader(weights, layout)
        for name, parameter in parameters.items():
            values = parameter.detach()
            staged = values if values.is_cpu else torch.empty_like(values, device="cpu")
            assembly.fill(name, words_of(staged), DTYPE_NAMES[values.dtype])
            values.copy_(staged)  # a no-op when both are the same tensor
