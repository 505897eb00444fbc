"""One generation of scored completions, and how it becomes the microbatches of every rank."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_grpo.batching import BatchSchedule
from megatron_grpo.config import Config
from megatron_grpo.exchange import Minibatches
from megatron_grpo.loss import loss_weights
from megatron_grpo.rollout.samples import Sample
from parallel.microbatches import CostModel, plan_microbatches
from parallel.packing import Alignment, TokenSequence, pack


@dataclass(frozen=True)
class Experience:
    """Scored samples of one generation; all lists and tensors are parallel, groups contiguous."""

    samples: list[Sample]
    rewards: list[dict[str, float]]
    totals: Tensor
    group_ids: Tensor
    advantages: Tensor
    old_logprobs: list[Tensor] | None = None
    """Of the sampled tokens under the policy that made them, in a generation that is resumed."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts and completions."""
        return sum(len(s.prompt.token_ids) + len(s.completion_ids) for s in self.samples)


def share_out(
    experience: Experience, generation: int, cost: CostModel, cfg: Config
) -> list[Minibatches]:
    """Pack the generation: for every data rank, for every optimizer step, its microbatches.

    `cost` is what a sequence of some length costs this model, for the balance over data ranks.
    Loss weights are fixed here, over the whole optimizer batch (DESIGN: idea 2).
    """
    dims, batches = cfg.dims, BatchSchedule.of(cfg.grpo)
    alignment = Alignment.of(dims, cfg.parallel.sequence_parallel)
    shares: list[Minibatches] = [[] for _ in range(dims.data)]
    for indices in batches.minibatches(generation, cfg.train.seed):
        sequences = _sequences(experience, indices, cfg)
        lengths = [len(sequence.tokens) for sequence in sequences]
        plan = plan_microbatches(
            lengths, cfg.train.max_tokens_per_microbatch, dims, alignment, cost
        )
        for share, microbatches in zip(shares, plan, strict=True):
            share.append([pack(sequences, chosen, alignment) for chosen in microbatches])
    return shares


def _sequences(experience: Experience, indices: list[int], cfg: Config) -> list[TokenSequence]:
    samples = [experience.samples[i] for i in indices]
    weights = loss_weights(
        torch.tensor([sample.num_sampled for sample in samples]),
        cfg.grpo.loss_type,
        cfg.rollout.max_completion_length,
    )
    return [
        TokenSequence(
            tokens=torch.tensor([*sample.prompt.token_ids, *sample.completion_ids]),
            num_prompt_tokens=len(sample.prompt.token_ids),
            advantage=float(experience.advantages[i]),
            loss_weight=float(weight),
            rollout_logprobs=torch.tensor(sample.logprobs),
            old_logprobs=_spread(experience.old_logprobs[i], sample)
            if experience.old_logprobs
            else None,
            response_mask=torch.tensor(sample.loss_mask, dtype=torch.bool),
        )
        for sample, i, weight in zip(samples, indices, weights, strict=True)
    ]


def _spread(values: Tensor, sample: Sample) -> Tensor:
    """Values of the sampled tokens, in the places of the completion's tokens."""
    mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
    return torch.zeros(len(mask), dtype=values.dtype).masked_scatter(mask, values)
