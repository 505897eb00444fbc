"""Scales of whole matrices, to which those of their blocks are relative (NVFP4).

They follow from the largest value of a matrix, and of all that engines put beside it: these have
one scale. So all values are read once before any is quantised.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from math import isfinite

import torch

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
    num_bytes_of,
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
) -> int:
    """Write those of the `places` that have one; arguments as of `transfer`, which is to follow.

    `fused` gives for each weight all that share its scale, itself included. `progress` counts the
    bytes of both; those of this one are returned. Raises ValueError for a weight that is not
    finite.
    """
    scaled = {
        name: (place, place.whole)
        for name, place in places.items()
        if isinstance(place, QuantizedPlace) and place.whole is not None
    }
    num_bytes = num_bytes_of({name: place for name, (place, _) in scaled.items()})
    total = num_bytes + num_bytes_of(places)
    shapes = {name: place.shape for name, (place, _) in scaled.items()}
    parts = Layout.of_parts(shapes, PART_BYTES // max(ITEM_SIZES.values()))
    rows = RowCache(weights.tensors, weights.layout.shapes)
    loader = ShardLoader(rows, weights.layout, parts.compose(layout))

    def size_of(part: ShardMapping) -> int:
        return part.box.num_elements * ITEM_SIZES[unquantized(places[part.tensor])]

    def maxima_of(share: Sequence[ShardMapping]) -> list[tuple[str, float]]:
        found = []
        for part in share:
            values = torch.empty(part.box.size, dtype=DTYPES[unquantized(places[part.tensor])])
            loader.fill(part.local, values)
            found.append((part.tensor, float(values.abs().amax())))
            add_bytes(values.nbytes)
        return found

    in_order = in_reading_order(parts.pieces, weights, loader)
    shares = list(in_groups(in_order, size_of, SHARE_BYTES))
    maxima: dict[str, float] = defaultdict(float)
    found = run_tasks(maxima_of, shares, num_workers, lambda done: progress(done, total))
    for name, maximum in chain.from_iterable(found):
        if not isfinite(maximum):
            raise ValueError(f"{name} has values that are not finite: it cannot be quantised")
        maxima[name] = max(maxima[name], maximum)
    for name, (_, place) in scaled.items():
        largest = torch.tensor(max(maxima[other] for other in fused[name]))
        with place.file.open("r+b", buffering=0) as file:
            write_box(file.fileno(), place, Box((0,), (1,)), whole_scale(largest))
    return num_bytes
