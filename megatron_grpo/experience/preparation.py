"""Prepares a generation for training: packs it, distributes it, and computes log-probabilities.

Every rank has a `Preparation`, whose methods are collective; only rank 0 has the `Experience`.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_grpo.config.config import Config
from megatron_grpo.experience.batching import BatchSchedule
from megatron_grpo.experience.exchange import Minibatches, distribute
from megatron_grpo.experience.experience import Experience, less_kl, share_out
from megatron_grpo.experience.kl_reward import by_sample, sequence_kl, with_advantages
from megatron_grpo.experience.old_policy import add_logprobs
from megatron_grpo.policy.model import Model, Policy
from megatron_grpo.timing import PhaseTimer
from parallel.groups import Groups
from parallel.microbatches import CostModel


@dataclass(frozen=True)
class Preparation:
    """One rank's part of the work done once per generation, and again when it is resumed."""

    policy: Policy
    reference: Model | None
    cost: CostModel
    """Cost of a sequence by its length, to balance the data ranks."""
    cfg: Config
    groups: Groups
    device: torch.device

    def minibatches(
        self, experience: Experience | None, generation: int, timer: PhaseTimer
    ) -> Minibatches:
        """Return this rank's share of the generation, with the log-probabilities for the loss."""
        with timer.phase("pack"):
            shares = None
            if experience:
                shares = share_out(experience, generation, self.cost, self.cfg)
            packed = distribute(shares, self.groups, self.device)
        with timer.phase("logprobs"):
            return [
                add_logprobs(minibatch, self.policy, self.reference, self.cfg, self.groups)
                for minibatch in packed
            ]

    def less_kl(
        self,
        experience: Experience | None,
        minibatches: Minibatches,
        generation: int,
        beta: float,
    ) -> tuple[Experience | None, Minibatches]:
        """Recompute the advantages of both from the rewards minus `beta` times the KL divergence
        from the reference."""
        batches = BatchSchedule.of(self.cfg.grpo)
        found = sequence_kl(minibatches, batches.minibatch_size, self.groups)
        indices = batches.minibatches(generation, self.cfg.train.seed)
        kl = by_sample(found, indices)
        if experience:
            experience = less_kl(experience, kl, beta, self.cfg)
            kl = experience.advantages
        advantages = kl.to(self.device)
        dist.broadcast(advantages, src=0)
        return experience, with_advantages(minibatches, [advantages[i] for i in indices])
