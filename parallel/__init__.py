"""Floor 0: mesh, packing, context parallelism, vocab-parallel maths, layouts.

What needs Megatron-Core is not here, because importing it takes seconds: `parallel.attention`,
`parallel.device` and `parallel.groups` are imported by name.
"""

from parallel.context import context_indices, context_inverse
from parallel.dims import Coordinates, ParallelDims, divisors, pipeline_layers
from parallel.layout import Box, Copy, Layout, Piece, Shape, cover_exactly, intersect
from parallel.microbatches import CostModel, plan_microbatches
from parallel.packing import Alignment, PackedBatch, TokenSequence, pack
from parallel.vocab import chosen_logprobs, local_mask, prediction_targets

__all__ = [
    "Alignment",
    "Box",
    "Coordinates",
    "Copy",
    "CostModel",
    "Layout",
    "PackedBatch",
    "ParallelDims",
    "Piece",
    "Shape",
    "TokenSequence",
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
    "prediction_targets",
]
