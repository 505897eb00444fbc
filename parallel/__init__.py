"""Floor 0: mesh, packing, context parallelism, vocab-parallel maths, layouts, resharding.

What needs Megatron-Core is not here, because importing it takes seconds: `parallel.attention`,
`parallel.device` and `parallel.groups` are imported by name.
"""

from parallel.context import context_indices, context_inverse
from parallel.dims import Coordinates, ExpertPlace, ParallelDims, divisors, pipeline_layers
from parallel.layout import Axes, Box, Copy, Layout, Piece, Shape, cover_exactly, intersect
from parallel.microbatches import CostModel, plan_microbatches
from parallel.packing import Alignment, PackedBatch, TokenSequence, pack
from parallel.reshard import (
    Sender,
    Traffic,
    check_arrivals,
    plan_sends,
    senders_by_worker,
    traffic,
)
from parallel.vocab import chosen_logprobs, local_mask, prediction_targets

__all__ = [
    "Alignment",
    "Axes",
    "Box",
    "Coordinates",
    "Copy",
    "CostModel",
    "ExpertPlace",
    "Layout",
    "PackedBatch",
    "ParallelDims",
    "Piece",
    "Sender",
    "Shape",
    "TokenSequence",
    "Traffic",
    "check_arrivals",
    "chosen_logprobs",
    "context_indices",
    "context_inverse",
    "cover_exactly",
    "divisors",
    "intersect",
    "local_mask",
    "pack",
    "pipeline_layers",
    "plan_microbatches",
    "plan_sends",
    "prediction_targets",
    "senders_by_worker",
    "traffic",
]
