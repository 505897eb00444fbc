"""Sums of gradients and gathering of weights over data ranks, while layers compute.

Megatron-Core's DistributedDataParallel does both by hooks: it reduces a bucket of gradients once
the last of them is there, and before a module's forward waits until its weights are whole.
"""

from collections.abc import Sequence
from typing import Any


def reduce_in_last_backward(chunks: Sequence[Any]) -> None:
    """Tell Megatron's schedules to reduce gradients only in a chunk's last backward of a step.

    They would reduce after each microbatch, sums included that were reduced before.
    """
    functions = [chunk.no_sync for chunk in chunks]
    chunks[0].config.no_sync_func = functions if len(functions) > 1 else functions[0]


def whole_weights(chunks: Sequence[Any]) -> None:
    """Gather the weights that the last update has changed, as the next forward would have done.

    Until then a rank has only its shard of the new ones. Does nothing where an update gathers them
    itself. Collective over data and context ranks; not between the reduction of a gradient and the
    update by it, as the forward after that would take the weights for whole.
    """
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
