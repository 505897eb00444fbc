"""Floor 0: mesh, packing, context parallelism, vocab-parallel maths, layouts."""

from parallel.attention import PackedAttention
from parallel.context import context_indices, context_inverse
from parallel.device import communication_backend, setup_device
from parallel.dims import Coordinates, ParallelDims, divisors, pipeline_layers
from parallel.groups import Groups, destroy_groups, init_groups
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
    "Groups",
    "Layout",
    "PackedAttention",
    "PackedBatch",
    "ParallelDims",
    "Piece",
    "Shape",
    "TokenSequence",
    "chosen_logprobs",
    "communication_backend",
    "context_indices",
    "context_inverse",
    "cover_exactly",
    "destroy_groups",
    "divisors",
    "init_groups",
    "intersect",
    "local_mask",
    "pack",
    "pipeline_layers",
    "plan_microbatches",
    "prediction_targets",
    "setup_device",
]
