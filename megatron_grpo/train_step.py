"""One optimizer step of GRPO over packed microbatches, and the log-probabilities before it."""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.batching import BatchSchedule
from megatron_grpo.config import Config
from megatron_grpo.loss import grpo_loss
from megatron_grpo.metrics import AllReduce, TrainMetrics
from megatron_grpo.model import Model, Policy
from megatron_grpo.nonfinite import is_so_on_all_ranks, name_nonfinite
from megatron_grpo.optimizer import apply_gradient, copies_are_finite, gradient_norm
from megatron_grpo.schedule import run_schedule
from megatron_grpo.skipped_steps import SkippedSteps
from parallel.context import context_indices
from parallel.groups import Groups
from parallel.packing import PackedBatch
from parallel.vocab import chosen_logprobs, local_mask, prediction_targets


def response_logprobs(
    model: Model, logits: Tensor, batch: PackedBatch, temperature: float, groups: Groups
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and entropies [T] of the response tokens, and which of them are ours [T].

    `logits` [T / cp, padded vocabulary / tp] are this rank's. Under context parallelism each rank
    predicts its part of the tokens; elsewhere the values are 0, so that a sum over the context
    group is the whole.
    """
    local = context_indices(batch.cu_seqlens, groups.coordinates.context, groups.dims.context)
    targets = prediction_targets(batch.cu_seqlens, local)
    mine = local_mask(targets, len(batch.tokens)) & batch.loss_mask
    logprobs, entropy = chosen_logprobs(
        logits,
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
) -> list[Tensor | None]:
    """Log-probabilities [T] of every microbatch, without gradient; None before the last stage."""

    def collect(logits: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        logprobs, _, _ = response_logprobs(model, logits, batch, temperature, groups)
        dist.all_reduce(logprobs, group=groups.context)
        return logprobs.sum(), logprobs

    outputs = run_schedule(model, groups, batches, collect, forward_only=True)
    return list(outputs) if model.is_last_stage else [None] * len(batches)


def add_logprobs(
    batches: Sequence[PackedBatch],
    policy: Policy,
    reference: Model | None,
    cfg: Config,
    groups: Groups,
) -> list[PackedBatch]:
    """Fill `old_logprobs`, and `ref_logprobs` when there is a reference.

    With one update per generation the old policy is the policy itself, and its pass is left out:
    the ratio is exactly 1, and the loss takes its own log-probabilities, detached. Those that are
    there already, of a generation that is resumed, stay: either model may have moved since.
    """
    temperature = cfg.rollout.temperature
    is_reused = BatchSchedule.of(cfg.grpo).updates_per_generation > 1
    old = [batch.old_logprobs for batch in batches]
    if is_reused and old[0] is None:
        old = compute_logprobs(policy, batches, temperature, groups)
    ref = [batch.ref_logprobs for batch in batches]
    if reference and ref[0] is None:
        ref = compute_logprobs(reference, batches, temperature, groups)
    return [
        replace(batch, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)
        for batch, old_logprobs, ref_logprobs in zip(batches, old, ref, strict=True)
    ]


def train_step(
    policy: Policy,
    batches: Sequence[PackedBatch],
    cfg: Config,
    groups: Groups,
    skipped: SkippedSteps,
) -> dict[str, float]:
    """One update from this rank's microbatches of the optimizer batch; all ranks call it together.

    Loss weights are global, so loss and gradient are plain sums over microbatches, context and data
    ranks. Returns the metrics of the whole optimizer batch, the same on every rank.

    With a loss or gradient that is NaN or infinite on any rank, all skip the step: weights,
    optimizer and scheduler stay as they are, `skipped` counts it, and the metrics, with
    `skipped_steps` 1, lack what is not finite. Nor is a step taken by a gradient of exactly 0, when
    no token has a weight or an advantage: by momentum and weight decay alone nothing is learnt.
    """
    metrics = accumulate_gradient(policy, batches, cfg, groups)
    grad_norm = gradient_norm(policy.optimizer)
    cause = _why_not(policy, metrics, grad_norm, batches[0].tokens.device)
    if cause and groups.rank == 0:
        print(f"optimizer step skipped: {cause}", file=sys.stderr, flush=True)
    skipped.count(cause)
    reduced = metrics.reduce(_over_other_tokens(groups), with_kl=cfg.grpo.beta > 0)
    reduced["lr"] = policy.optimizer.param_groups[0]["lr"]
    if cause:
        finite = {name: value for name, value in reduced.items() if math.isfinite(value)}
        return {**finite, "skipped_steps": 1.0}
    if grad_norm > 0:
        apply_gradient(policy.optimizer, grad_norm)
        policy.scheduler.step(increment=1)
    return {**reduced, "grad_norm": grad_norm, "skipped_steps": 0.0}


def _why_not(
    policy: Policy, metrics: TrainMetrics, grad_norm: float, device: torch.device
) -> str | None:
    """What is not finite, and on which rank; None, on all ranks, when all is."""
    is_finite = (
        math.isfinite(grad_norm)
        and copies_are_finite(policy.optimizer)
        and math.isfinite(sum(metrics.losses))
    )
    if is_so_on_all_ranks(is_finite, device):
        return None
    return name_nonfinite(policy, metrics.losses, device)


def accumulate_gradient(
    policy: Policy, batches: Sequence[PackedBatch], cfg: Config, groups: Groups
) -> TrainMetrics:
    """Put the gradient of the optimizer batch into the policy's gradient buffers, from zero.

    Returns this rank's part of the metrics.
    """
    grpo, num_sequences = cfg.grpo, BatchSchedule.of(cfg.grpo).minibatch_size
    metrics = TrainMetrics(num_sequences, batches[0].tokens.device)

    def loss_of(logits: Tensor, batch: PackedBatch) -> tuple[Tensor, None]:
        logprobs, entropy, mine = response_logprobs(
            policy, logits, batch, cfg.rollout.temperature, groups
        )
        loss = grpo_loss(
            logprobs,
            batch.old_logprobs,
            batch.ref_logprobs,
            batch.advantages,
            batch.loss_weights,
            mine,
            epsilon=grpo.epsilon,
            epsilon_high=grpo.epsilon_high,
            delta=grpo.delta,
            beta=grpo.beta,
        )
        metrics.add(batch, mine, loss, logprobs, entropy)
        return loss.total, None

    policy.zero_grad()
    run_schedule(policy, groups, batches, loss_of, forward_only=False)
    return metrics


def _over_other_tokens(groups: Groups) -> AllReduce:
    """An all-reduce over every rank that holds other tokens; earlier stages add nothing."""

    def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        dist.all_reduce(tensor, op, group=groups.data_context)
        dist.all_reduce(tensor, op, group=groups.pipeline)

    return all_reduce
