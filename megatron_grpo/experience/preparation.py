"""Prepares a generation for training: packs it, distributes it, and computes log-probabilities.

Every rank has a `Preparation`, whose methods are collective; only rank 0 has the `Experience`.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_grpo.config.config import Config
from megatron_grpo.experience.batching import BatchSchedule
from megatron_grpo.experience.exchange import Minibatches, distribute
from megatron_grpo.experience.experience import Experience, subtract_kl
from megatron_grpo.experience.kl_reward import by_sample, sequence_kl, with_advantages
from megatron_grpo.experience.old_policy import add_logprobs
from megatron_grpo.experience.shares import share_out
from megatron_grpo.policy.model import Model, Policy
from megatron_grpo.policy.router_replay import with_own_layers
from megatron_grpo.timing import PhaseTimer
from parallel.alignment import Alignment
from parallel.groups import Groups
from parallel.microbatches import CostModel


def packed_minibatches(
    experience: Experience | None,
    generation: int,
    cost: CostModel,
    cfg: Config,
    groups: Groups,
    device: torch.device,
) -> Minibatches:
    """This rank's share of the generation; collective, and only rank 0 has the `experience`.

    Rank 0 divides the next optimizer batch while the others pack theirs.
    """
    alignment = Alignment.of(cfg.dims, cfg.parallel.sequence_parallel)
    shares = share_out(experience, generation, cost, cfg) if experience else None
    minibatches = []
    for _ in range(cfg.grpo.steps_per_generation):
        share = distribute(next(shares) if shares else None, groups)
        batches = share.pack(alignment, share_prompts=cfg.grpo.shared_prompts)
        minibatches.append([with_own_layers(batch, groups).to(device) for batch in batches])
    return minibatches


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
            packed = packed_minibatches(
                experience, generation, self.cost, self.cfg, self.groups, self.device
            )
        with timer.phase("logprobs"):
            return [
                add_logprobs(minibatch, self.policy, self.reference, self.cfg, self.groups)
                for minibatch in packed
            ]

    def subtract_kl(
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
        advantages = torch.empty_like(kl)  # received from rank 0, which has the rewards
        if experience:
            experience = subtract_kl(experience, kl, beta, self.cfg)
            advantages = experience.advantages
        advantages = advantages.to(self.device)
        dist.broadcast(advantages, src=0)
        return experience, with_advantages(minibatches, [advantages[i] for i in indices])
