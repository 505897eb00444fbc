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
from parallel.vocab import ChosenTokens, chosen_logprobs, prediction_targets


def response_logprobs(
    model: Model, hidden: Tensor, batch: PackedBatch, temperature: float, groups: Groups
) -> ChosenTokens:
    """Log-probabilities and entropies of this context rank's response tokens.

    `hidden` are the last stage's final hidden states (`forward`); only those at positions that
    predict response tokens are multiplied with the head.
    """
    local = context_indices(batch.cu_seqlens, groups.coordinates.context, groups.dims.context)
    targets = prediction_targets(batch.cu_seqlens, local)
    return chosen_logprobs(
        hidden,
        model.head_weight,
        batch.tokens,
        targets,
        batch.loss_mask,
        temperature=temperature,
        vocab_size=model.shape.vocab_size,
        tensor_group=groups.tensor,
    )


def compute_logprobs(
    model: Model, batches: Sequence[PackedBatch], temperature: float, groups: Groups
) -> list[tuple[Tensor, Tensor]] | None:
    """Log-probabilities and entropies [T] of every microbatch, without gradient.

    Complete on every context and tensor rank of the last stage; None on earlier stages.
    """

    def collect(hidden: Tensor, batch: PackedBatch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        chosen = response_logprobs(model, hidden, batch, temperature, groups)
        both = torch.stack(chosen.whole(len(batch.tokens)))
        dist.all_reduce(both, group=groups.context)
        return chosen.logprobs.sum(), (both[0].clone(), both[1].clone())

    outputs = run_schedule(model, groups, batches, collect, forward_only=True)
    return list(outputs) if model.is_last_stage else None
