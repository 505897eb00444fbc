"""Tensors put together from boxes of a source, one at a time: the core of every conversion."""

from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_convert.shape import ModelShape
from checkpoint_convert.weights import Weights, open_weights
from parallel import Box, Copy, Layout, intersect
from parallel.views import as_local, as_whole


class Assembly:
    """Builds the local tensors of a layout from weights in files, reading only their boxes."""

    def __init__(self, weights: Weights, layout: Layout) -> None:
        layout.check_complete()
        self._source = weights.tensors
        self._copies: dict[str, list[Copy]] = defaultdict(list)
        for copy in intersect(weights.layout, layout):
            self._copies[copy.destination].append(copy)
        self._zeros: dict[str, list[Box]] = defaultdict(list)
        for name, box in layout.zeros:
            self._zeros[name].append(box)

    def fill(self, name: str, tensor: Tensor) -> None:
        """Write every element of the local tensor `name`, in the dtype and device of `tensor`."""
        with torch.no_grad():
            for copy in self._copies[name]:
                target = as_whole(tensor[copy.destination_box.slices], copy.destination_axes)
                num_dims = len(copy.source_box.size)
                target = as_local(target, copy.source_axes, num_dims)
                self._source.read_into(copy.source, copy.source_box, target)
            for box in self._zeros[name]:
                tensor[box.slices].zero_()


def read_weights(
    path: Path, shape: ModelShape, layout: Layout, parameters: Mapping[str, Tensor]
) -> None:
    """Fill every element of `parameters`, the local tensors that `layout` describes, in place.

    Values are converted to the dtype and device of each parameter. Raises the ValueError of
    `open_weights` when the files at `path` do not hold the model.
    """
    layout.check_shapes({name: tuple(tensor.shape) for name, tensor in parameters.items()})
    with closing(open_weights(path, shape)) as weights:
        assembly = Assembly(weights, layout)
        for name, parameter in parameters.items():
            assembly.fill(name, parameter)
