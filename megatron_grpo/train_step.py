"""One optimizer step of GRPO over packed microbatches, and its profile."""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import profile

from megatron_grpo.algorithm.loss import LossTokens, grpo_loss
from megatron_grpo.algorithm.loss_function import LossFunction
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.config.config import Config
from megatron_grpo.config.train import TrainConfig
from megatron_grpo.policy.forward import response_logprobs, run_schedule
from megatron_grpo.policy.model import Policy
from megatron_grpo.policy.optimizer import (
    apply_gradient,
    gradient_norm,
    own_gradient_is_finite,
)
from megatron_grpo.policy.skipped_steps import SkippedSteps, name_nonfinite
from megatron_grpo.reporting.metrics import StepReport, TrainMetrics
from megatron_grpo.timing import PhaseTimer
from parallel.collectives import any_rank
from parallel.groups import Groups
from parallel.packing import PackedBatch

PROFILE_FOLDER = "profile"


def train_step(
    policy: Policy,
    batches: Sequence[PackedBatch],
    cfg: Config,
    groups: Groups,
    function: LossFunction,
    skipped: SkippedSteps,
    beta: float,
) -> StepReport:
    """Update the policy from this rank's microbatches of the optimizer batch; collective.

    Loss weights are global: loss and gradient are sums over microbatches, context and data ranks.
    `beta`: weight of the KL penalty. Returns the metrics of the whole optimizer batch, equal on
    all ranks.

    If a loss or gradient is NaN or infinite on any rank, all ranks skip the step: weights,
    optimizer and scheduler stay, `skipped` counts the step, and the metrics have `skipped_steps` 1
    and no values that are not finite. A gradient of exactly 0 (no token has a weight or an
    advantage) leaves the weights, too, but the learning rate schedule advances.
    """
    metrics = accumulate_gradient(policy, batches, cfg, groups, function, beta)
    grad_norm = gradient_norm(policy.optimizer)
    cause = _nonfinite_cause(policy, metrics, grad_norm, batches[0].tokens.device)
    if cause and groups.rank == 0:
        print(f"optimizer step skipped: {cause}", file=sys.stderr, flush=True)
    if cause or skipped.num_in_a_row:  # a count of 0 needs no reset
        skipped.count(cause)
    report = metrics.reduce(groups.reduce_over_tokens, cfg.grpo)
    lr = policy.optimizer.param_groups[0]["lr"]
    of_routers = policy.router_losses.means() if policy.router_losses else {}
    reduced = {**report.metrics, **of_routers, "lr": lr}
    if policy.mtp:  # before the scheduler's step: at the learning rate of the policy's update
        reduced |= policy.mtp.update(policy.scheduler.num_steps)
    # With a gradient of 0, only momentum and weight decay would move the weights.
    if grad_norm > 0 and not cause:
        apply_gradient(policy.optimizer, grad_norm)
    policy.optimizer.zero_grad()  # lets go of the float32 copies of gradients in bfloat16
    if cause:
        finite = {name: value for name, value in reduced.items() if math.isfinite(value)}
        return replace(report, metrics={**finite, "skipped_steps": 1.0})
    policy.scheduler.step(increment=1)
    done = {**reduced, "grad_norm": grad_norm, "skipped_steps": 0.0}
    return replace(report, metrics=done)


def _nonfinite_cause(
    policy: Policy, metrics: TrainMetrics, grad_norm: float, device: torch.device
) -> str | None:
    """Name a value that is not finite, and its rank; None on all ranks if all are finite."""
    is_finite = (
        math.isfinite(grad_norm)
        and own_gradient_is_finite(policy.optimizer)
        and math.isfinite(sum(metrics.losses))
    )
    if not any_rank(not is_finite, device):
        return None
    return name_nonfinite(policy, metrics.losses, device)


def accumulate_gradient(
    policy: Policy,
    batches: Sequence[PackedBatch],
    cfg: Config,
    groups: Groups,
    function: LossFunction,
    beta: float,
) -> TrainMetrics:
    """Zero the gradient buffers and accumulate the gradient of the optimizer batch; returns this
    rank's part of the metrics."""
    schedule = BatchSchedule.of(cfg.grpo)
    trains_again = schedule.updates_per_generation > 1
    metrics = TrainMetrics(
        schedule.minibatch_size,
        batches[0].tokens.device,
        values=function.values,
        old_is_rollout=cfg.grpo.old_logprobs == "rollout",
        num_logged_tokens=cfg.train.log_tokens,
    )

    def loss_of(hidden: Tensor, batch: PackedBatch) -> tuple[Tensor, None]:
        if policy.mtp:
            policy.mtp.add_loss(hidden, batch, policy.head_weight)
        chosen = response_logprobs(policy, hidden, batch, cfg.rollout.temperature, groups)
        tokens = LossTokens.select(batch, chosen, groups.contexts[batch.context_size])
        loss = grpo_loss(tokens, cfg.grpo, function, beta)
        metrics.add(tokens, loss)
        # No old log-probabilities: the policy is still the generating one, and these are the old
        # log-probabilities of further updates.
        if trains_again and batch.old_logprobs is None:
            with torch.no_grad():
                metrics.logprobs.append(chosen.whole(len(batch.tokens))[0])
        return loss.total, None

    policy.zero_grad()
    if policy.mtp:
        batches = policy.mtp.begin(policy.chunks, batches)
    run_schedule(policy, groups, batches, loss_of, forward_only=False)
    return metrics


@contextmanager
def profiled_step(train: TrainConfig, step: int, timer: PhaseTimer) -> Iterator[None]:
    """Record optimizer step `step` on `train.profile_ranks`, for https://ui.perfetto.dev.

    Collective.
    """
    if step not in train.profile_steps:
        yield
        return
    rank = dist.get_rank()
    recorded = profile() if rank in train.profile_ranks else None
    if recorded:
        recorded.start()
    yield
    # The watchdog has no limit for this phase: a trace has up to some GB, and a rank that writes it
    # must not look hung.
    with timer.phase("save"):
        if recorded:
            recorded.stop()  # evaluates all events: of a large step, for a minute or more
            folder = train.run_dir / PROFILE_FOLDER
            folder.mkdir(exist_ok=True)
            recorded.export_chrome_trace(str(folder / f"step_{step}_rank_{rank}.json.gz"))
        dist.barrier()
