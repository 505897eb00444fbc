"""Prepares a generation for training: packs it, distributes it, and computes log-probabilities.

Log-probabilities of the old policy and of the reference, the tokens of the objective and the KL
divergence as a reward are computed once, before training on the generation. Only the first
optimizer batch may take its old log-probabilities from its own forward in training. Every rank has
a `Preparation`, whose methods are collective; only rank 0 has the `Experience`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.batch.advantage_function import AdvantageFunction
from megatron_grpo.batch.distribute import Minibatches, distribute, split_for_data_parallel
from megatron_grpo.batch.experience import Experience, subtract_kl
from megatron_grpo.batch.schedule import BatchSchedule, Cursor
from megatron_grpo.batch.token_values import (
    by_sample,
    keep_high_entropy,
    sequence_kl,
    with_advantages,
    with_entropy_weights,
)
from megatron_grpo.config.config import Config
from megatron_grpo.policy.forward import compute_logprobs
from megatron_grpo.policy.model import Model, Policy
from megatron_grpo.policy.mtp import with_second_tokens
from megatron_grpo.policy.router import with_own_layers
from megatron_grpo.policy.vision import with_features
from megatron_grpo.timing import PhaseTimer
from parallel.alignment import Alignment
from parallel.collectives import any_rank
from parallel.groups import Groups
from parallel.microbatches import CostModel
from parallel.packing import PackedBatch


def add_logprobs(
    batches: Sequence[PackedBatch],
    policy: Policy,
    reference: Model | None,
    cfg: Config,
    groups: Groups,
    *,
    is_next: bool,
) -> list[PackedBatch]:
    """Fill in `old_logprobs`, `ref_logprobs` if there is a reference, and the entropy fields.

    `batches` are this rank's part of one optimizer batch; ranks before the last stage get them back
    unchanged. `is_next` marks the batch that is trained on next.
    """
    grpo, temperature, entropies = cfg.grpo, cfg.rollout.temperature, list[Tensor]()
    filled = [*batches]
    if grpo.old_logprobs == "rollout":
        filled = [replace(batch, old_logprobs=batch.rollout_logprobs) for batch in batches]
    lacks_old = filled[0].old_logprobs is None and grpo.recomputes_old
    are_all_needed = grpo.num_old_passes == grpo.steps_per_generation
    # The batch trained on next needs no pass of its own: the old policy is the policy, the ratio is
    # exactly 1, and the loss uses its own log-probabilities, detached; see `with_old_logprobs`.
    if grpo.top_entropy_quantile < 1 or (lacks_old and (are_all_needed or not is_next)):
        computed = compute_logprobs(policy, filled, temperature, groups)
        entropies = [entropy for _, entropy in computed]
        if lacks_old:
            filled = _filled(filled, "old_logprobs", [logprobs for logprobs, _ in computed])
    if reference:
        computed = compute_logprobs(reference, batches, temperature, groups)
        filled = _filled(filled, "ref_logprobs", [logprobs for logprobs, _ in computed])
    if not policy.is_last_stage:
        return filled
    if grpo.top_entropy_quantile < 1:
        filled = keep_high_entropy(filled, entropies, grpo.top_entropy_quantile, groups)
    return with_entropy_weights(filled, groups) if grpo.entropy_coef else filled


def with_old_logprobs(
    batches: Sequence[PackedBatch], logprobs: Sequence[Tensor], groups: Groups
) -> list[PackedBatch]:
    """Fill in the old log-probabilities that a step on the `batches` computed in its own forward.

    `logprobs` [T] cover each batch's tokens on this context rank, and are 0 elsewhere; empty if the
    batches have old log-probabilities, or before the last stage. All further steps on the batches
    compare with them.
    """
    for batch, of_batch in zip(batches, logprobs, strict=bool(logprobs)):
        dist.all_reduce(of_batch, group=groups.contexts[batch.context_size])
    return _filled(batches, "old_logprobs", logprobs)


def _filled(
    batches: Sequence[PackedBatch], name: str, values: Sequence[Tensor]
) -> list[PackedBatch]:
    """Set field `name` of the batches to `values`; before the last stage `values` is empty."""
    if not values:
        return list(batches)
    of_batch: list[dict[str, Any]] = [{name: value} for value in values]
    return [replace(batch, **new) for batch, new in zip(batches, of_batch, strict=True)]


@dataclass(frozen=True)
class Preparation:
    """One rank's part of the work done once per generation."""

    policy: Policy
    reference: Model | None
    cost: CostModel
    """Cost of a sequence by its length, to balance the data ranks."""
    cfg: Config
    groups: Groups
    device: torch.device

    @cached_property
    def alignment(self) -> Alignment:
        return self.cfg.alignment

    def packed(self, experience: Experience | None, generation: int) -> Minibatches:
        """This rank's shard of the generation, without log-probabilities."""
        cfg, groups, shards = self.cfg, self.groups, None
        indexer = self.policy.shape.indexer if cfg.rollout.indexer_replay else None
        if experience:
            shards = split_for_data_parallel(
                experience, generation, self.cost, cfg, groups.dims, self.alignment
            )
        minibatches, at = [], groups.coordinates
        for _ in range(cfg.grpo.steps_per_generation):
            # `shards` is lazy: rank 0 divides the next batch while the others pack this one.
            has_tower = self.policy.vision is not None
            shard = distribute(next(shards) if shards else None, groups, has_tower=has_tower)
            batches = shard.microbatches(
                self.alignment,
                share_prompts=cfg.grpo.shared_prompts,
                context_rank=at.context,
                index_topk=indexer.topk if indexer else 0,
            )
            if shard.sources:
                batches = with_features(batches, self.policy.vision)
            minibatches.append(list[PackedBatch]())
            # On the host, cut to this rank's part first: the GPU gets only what the rank needs.
            for batch in batches:
                if batch.routed_experts is not None or batch.chosen_tokens is not None:
                    batch = with_own_layers(batch, groups)
                batch = batch.on_rank(groups.dims, at)
                if cfg.model.mtp_num_layers:
                    batch = with_second_tokens(batch, groups)
                minibatches[-1].append(batch.to(self.device))
        return minibatches

    def minibatches(
        self, experience: Experience | None, cursor: Cursor, timer: PhaseTimer
    ) -> Minibatches:
        """This rank's shard of a generation, with the log-probabilities for the loss; training
        begins at `cursor`."""
        with timer.phase("pack"):
            packed = self.packed(experience, cursor.generation)
        with timer.phase("logprobs"):
            return [
                add_logprobs(
                    minibatch,
                    self.policy,
                    self.reference,
                    self.cfg,
                    self.groups,
                    is_next=number == cursor.minibatch,
                )
                for number, minibatch in enumerate(packed)
            ]

    def after_step(
        self, batches: Sequence[PackedBatch], logprobs: Sequence[Tensor], *, is_skipped: bool
    ) -> list[PackedBatch]:
        """Batches of a step with old log-probabilities, for further steps on them:
        `with_old_logprobs`."""
        if not is_skipped:
            return with_old_logprobs(batches, logprobs, self.groups)
        # Only the last stage knows whether they are needed, and the forward below is collective.
        if not any_rank(bool(logprobs), self.device):
            return list(batches)
        # The fault that skipped the step may be in its log-probabilities, too. The weights have not
        # changed, so a second forward would give the same log-probabilities.
        temperature = self.cfg.rollout.temperature
        computed = compute_logprobs(self.policy, batches, temperature, self.groups)
        return _filled(batches, "old_logprobs", [values for values, _ in computed])

    def subtract_kl(
        self,
        experience: Experience | None,
        minibatches: Minibatches,
        generation: int,
        beta: float,
        function: AdvantageFunction,
    ) -> tuple[Experience | None, Minibatches]:
        """Recompute the advantages of `experience` and `minibatches`, from the rewards minus `beta`
        times the KL divergence from the reference."""
        batches = BatchSchedule.of(self.cfg.grpo)
        found = sequence_kl(minibatches, batches.minibatch_size, self.groups)
        indices = batches.minibatches(generation, self.cfg.train.seed)
        kl = by_sample(found, indices)
        advantages = torch.empty_like(kl)  # received from rank 0, which has the rewards
        if experience:
            experience = subtract_kl(experience, kl, beta, function)
            advantages = experience.advantages
        advantages = advantages.to(self.device)
        dist.broadcast(advantages, src=0)
        return experience, with_advantages(minibatches, [advantages[i] for i in indices])
