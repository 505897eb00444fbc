"""Scales of whole matrices, to which those of their blocks are relative (NVFP4).

They follow from the largest value of a matrix, and of all that engines put beside it: these have
one scale. So all values are read once before any is quantised.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from checkpoint_convert.formats.safetensors_file import ITEM_SIZES, TensorPlace
from checkpoint_convert.formats.tensor_io import write_box
from checkpoint_convert.formats.torch_dtypes import DTYPES
from checkpoint_convert.quantized_place import QuantizedPlace
from checkpoint_convert.quantizer import whole_scale
from checkpoint_convert.transfer import (
    PART_BYTES,
    SHARE_BYTES,
    add_bytes,
    in_reading_order,
    run_tasks,
    unquantized,
)
from checkpoint_convert.weights import Progress, RowCache, ShardLoader, Weights, in_groups
from parallel import Box, Layout, ShardMapping


def write_whole_scales(
    weights: Weights,
    layout: Layout,
    places: Mapping[str, TensorPlace],
    fused: Mapping[str, Sequence[str]],
    num_workers: int,
    progress: Progress,
) -> None:
    """Write those of the `places` that have one; arguments as of `transfer`.

    `fused` gives for each weight all that share its scale, itself included. Raises ValueError for a
    weight that is not finite.
    """
    scaled = {
        name: (place, place.whole)
        for name, place in places.items()
        if isinstance(place, QuantizedPlace) and place.whole is not None
    }
    shapes = {name: place.shape for name, (place, _) in scaled.items()}
    parts = Layout.of_parts(shapes, PART_BYTES // max(ITEM_SIZES.values()))
    rows = RowCache(weights.tensors, weights.layout.shapes)
    loader = ShardLoader(rows, weights.layout, parts.compose(layout))

    def size_of(part: ShardMapping) -> int:
        return part.box.num_elements * ITEM_SIZES[unquantized(places[part.tensor])]

    def maxima_of(share: Sequence[ShardMapping]) -> list[tuple[str, Tensor]]:
        found = []
        for part in share:
            values = torch.empty(part.box.size, dtype=DTYPES[unquantized(places[part.tensor])])
            loader.fill(part.local, values)
            found.append((part.tensor, values.abs().amax().float()))
            add_bytes(values.nbytes)
        return found

    num_bytes = sum(map(size_of, parts.pieces))
    in_order = in_reading_order(parts.pieces, weights, loader)
    shares = list(in_groups(in_order, size_of, SHARE_BYTES))
    maxima: dict[str, list[Tensor]] = defaultdict(list)
    for found in run_tasks(maxima_of, shares, num_workers, lambda done: progress(done, num_bytes)):
        for name, maximum in found:
            maxima[name].append(maximum)
    for name, (_, place) in scaled.items():
        largest = torch.stack([each for other in fused[name] for each in maxima[other]]).amax()
        if not largest.isfinite():
            raise ValueError(f"{name} has values that are not finite: it cannot be quantised")
        with place.file.open("r+b", buffering=0) as file:
            write_box(file.fileno(), place, Box((0,), (1,)), whole_scale(largest))
