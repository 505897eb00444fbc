"""What a generation becomes before it is trained on: packed, handed out, and known to the models.

Every rank has a `Preparation`, and all call the same method at the same time; rank 0 alone has the
`Experience`.
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
    """A rank's part of what is done once with each generation, or again when it is resumed."""

    policy: Policy
    reference: Model | None
    cost: CostModel
    """Of a sequence of some length, for the balance over data ranks."""
    cfg: Config
    groups: Groups
    device: torch.device

    def minibatches(
        self, experience: Experience | None, generation: int, timer: PhaseTimer
    ) -> Minibatches:
        """This rank's share of the generation, with the log-probabilities that the loss needs."""
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
        """Both with `beta` times the divergence from the reference taken out of the rewards that
        advantages compare."""
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
