"""Log-probabilities of the response tokens of packed microbatches, under any model."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.policy.model import Model
from megatron_grpo.policy.schedule import run_schedule
from parallel.context import context_indices
from parallel.groups import Groups
from parallel.packing import PackedBatch
from parallel.vocab import chosen_logprobs, local_mask, prediction_targets


def response_logprobs(
    model: Model, hidden: Tensor, batch: PackedBatch, temperature: float, groups: Groups
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and entropies [T] of the response tokens, and which of them are ours [T].

    `hidden` are the last stage's final hidden states (`forward`); only those before response tokens
    reach the head. Under context parallelism each rank predicts its part of the tokens; elsewhere
    the values are 0, so that a sum over the context group is the whole.
    """
    local = context_indices(batch.cu_seqlens, groups.coordinates.context, groups.dims.context)
    targets = prediction_targets(batch.cu_seqlens, local)
    mine = local_mask(targets, len(batch.tokens)) & batch.loss_mask
    logprobs, entropy = chosen_logprobs(
        hidden,
        model.head_weight,
        batch.tokens,
        targets,
        mine,
        temperature=temperature,
        vocab_size=model.shape.vocab_size,
        tensor_group=groups.tensor,
    )
    return logprobs, entropy, mine


def compute_logprobs(
    model: Model, batches: Sequence[PackedBatch], temperature: float, groups: Groups
) -> list[tuple[Tensor, Tensor]] | None:
    """Log-probabilities and entropies [T] of every microbatch, without gradient.

    Whole on every context and tensor rank of the last stage; None before it.
    """

    def collect(hidden: Tensor, batch: PackedBatch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        logprobs, entropy, _ = response_logprobs(model, hidden, batch, temperature, groups)
        both = torch.stack([logprobs, entropy])
        dist.all_reduce(both, group=groups.context)
        return logprobs.sum(), (both[0].clone(), both[1].clone())

    outputs = run_schedule(model, groups, batches, collect, forward_only=True)
    return list(outputs) if model.is_last_stage else None
