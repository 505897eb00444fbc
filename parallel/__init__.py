"""Floor 0: mesh, packing, context parallelism, vocab-parallel maths, layouts, resharding.

This module exports functions of plain integers. Import functions that need torch or Megatron-Core,
which take seconds to load, from their own module: `from parallel.packing import pack`.
"""

from parallel.dims import Coordinates, ParallelDims, divisors, pipeline_layers
from parallel.layout import Axes, Box, Copy, Layout, Shape, ShardMapping, cover_exactly, intersect
from parallel.reshard import (
    Sender,
    all_shares,
    check_push,
    cut_shares,
    plan_sends,
    plan_shares,
    senders_by_worker,
)

__all__ = [
    "Axes",
    "Box",
    "Coordinates",
    "Copy",
    "Layout",
    "ParallelDims",
    "Sender",
    "Shape",
    "ShardMapping",
    "all_shares",
    "check_push",
    "cover_exactly",
    "cut_shares",
    "divisors",
    "intersect",
    "pipeline_layers",
    "plan_sends",
    "plan_shares",
    "senders_by_worker",
]
