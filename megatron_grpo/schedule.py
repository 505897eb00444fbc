"""Running packed microbatches through the pipeline with Megatron-Core's schedules."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_grpo.model import Model, forward
from parallel import PackedBatch
from parallel.groups import Groups

T = TypeVar("T")


def run_schedule(
    model: Model,
    groups: Groups,
    batches: Sequence[PackedBatch],
    loss_fn: Callable[[Tensor, PackedBatch], tuple[Tensor, T]],
    *,
    forward_only: bool,
) -> list[T]:
    """Forward, and unless `forward_only` backward, over all microbatches of this rank.

    `loss_fn(logits [T / cp, padded vocabulary / tp], batch)` is called on the last pipeline stage,
    in the order of `batches`, and returns this rank's part of the loss and anything else, which is
    collected. Losses are globally weighted: gradients are added up over microbatches, context and
    data ranks, and nothing is divided. Returns the collected values; empty on other stages.

    Every rank must pass as many microbatches; with interleaved stages, a multiple of the pipeline
    size.
    """
    dims = groups.dims
    assert dims.virtual_pipeline == 1 or len(batches) % dims.pipeline == 0, (
        f"interleaving needs a multiple of {dims.pipeline} microbatches, not {len(batches)}"
    )

    def forward_step(
        iterator: Any, chunk: Any
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, T]]]:
        batch = next(iterator)
        return forward(chunk, batch, groups), partial(_per_token_loss, loss_fn, batch)

    with torch.set_grad_enabled(not forward_only):
        collected: list[T] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in model.chunks],
            model=model.chunks,
            num_microbatches=len(batches),
            seq_length=len(batches[0].tokens),  # not read: each message tells its own shape
            micro_batch_size=1,
            forward_only=forward_only,
        )
    return collected


def _per_token_loss(
    loss_fn: Callable[[Tensor, PackedBatch], tuple[Tensor, T]], batch: PackedBatch, logits: Tensor
) -> tuple[Tensor, Tensor, T]:
    """The triple that Megatron's schedule leaves undivided; its token count is never used."""
    loss, collected = loss_fn(logits, batch)
    return loss, torch.zeros((), dtype=torch.int), collected
