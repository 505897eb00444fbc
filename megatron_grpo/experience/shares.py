"""Dividing a generation: which data rank trains on which sequences, and in which microbatches."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from megatron_grpo.algorithm.loss import loss_weights
from megatron_grpo.config.config import Config
from megatron_grpo.experience.batching import BatchSchedule
from megatron_grpo.experience.experience import Experience
from megatron_grpo.rollout.samples import Sample
from parallel.alignment import Alignment
from parallel.microbatches import CostModel, Plan, plan_microbatches
from parallel.packing import KNOWN, TokenSequence, by_prompt
from parallel.share import Share
from parallel.shared_prompts import PromptGroup, plan_shared_prompts


def share_out(
    experience: Experience, generation: int, cost: CostModel, cfg: Config
) -> Iterator[list[Share]]:
    """Divide each optimizer batch of the generation: one share for every data rank.

    `cost` estimates the cost of a sequence by its length, to balance the data ranks. Loss weights
    are fixed here, over the whole optimizer batch, so that they do not depend on the packing.
    """
    alignment = Alignment.of(cfg.dims, cfg.parallel.sequence_parallel)
    for indices in BatchSchedule.of(cfg.grpo).minibatches(generation, cfg.train.seed):
        sequences = _sequences(experience, indices, cfg)
        plan = _plan(sequences, alignment, cost, cfg)
        yield [Share.of(sequences, microbatches) for microbatches in plan]


def _plan(
    sequences: list[TokenSequence], alignment: Alignment, cost: CostModel, cfg: Config
) -> Plan:
    max_tokens = cfg.train.max_tokens_per_microbatch
    if not cfg.grpo.shared_prompts:
        lengths = [len(sequence.tokens) for sequence in sequences]
        return plan_microbatches(lengths, max_tokens, cfg.dims, alignment, cost)
    groups = [
        PromptGroup(
            num_prompt_tokens=sequences[members[0]].num_prompt_tokens,
            responses={i: len(sequences[i].rollout_logprobs) for i in members},
        )
        for members in by_prompt(sequences)
    ]
    return plan_shared_prompts(groups, max_tokens, cfg.dims, alignment, cost)


def _sequences(experience: Experience, indices: list[int], cfg: Config) -> list[TokenSequence]:
    samples = [experience.samples[i] for i in indices]
    known = {name: values for name in KNOWN if (values := getattr(experience, name)) is not None}
    masks = [_response_mask(experience, i, cfg) for i in indices]
    weights = loss_weights(
        torch.stack([mask.sum() for mask in masks]),
        cfg.grpo.loss_type,
        cfg.rollout.max_completion_length,
    )
    return [
        TokenSequence(
            tokens=_tokens(sample),
            num_prompt_tokens=len(sample.prompt.token_ids),
            advantage=experience.token_advantages[i]
            if experience.token_advantages
            else float(experience.advantages[i]),
            loss_weight=float(weight),
            rollout_logprobs=torch.from_numpy(np.asarray(sample.logprobs, np.float32)),
            response_mask=mask,
            routed_experts=routes,
            **{name: values[i] for name, values in known.items()},
        )
        for sample, i, mask, weight, routes in zip(
            samples, indices, masks, weights, _routes(samples), strict=True
        )
    ]


def _tokens(sample: Sample) -> Tensor:
    """Prompt and completion, int32: half as much to send as the int64 that a model takes."""
    both = (sample.prompt.token_ids, sample.completion_ids)
    return torch.from_numpy(np.concatenate([np.asarray(ids, np.int32) for ids in both]))


def _routes(samples: list[Sample]) -> list[Tensor | None]:
    """The experts of the tokens of each sample; of no token, where only other samples have any."""
    found = [sample.routed_experts for sample in samples]
    nothing = next((routes[:0] for routes in found if routes is not None), None)
    all_or_none = [nothing if routes is None else routes for routes in found]
    return [None if routes is None else torch.from_numpy(routes) for routes in all_or_none]


def _response_mask(experience: Experience, i: int, cfg: Config) -> Tensor:
    """Which tokens of completion `i` enter the loss: none if it is filtered or has no reward."""
    sample = experience.samples[i]
    is_overlong = cfg.grpo.overlong_filter and sample.finish_reason == "length"
    counts = not is_overlong and not bool(experience.totals[i].isnan())
    return torch.from_numpy(np.asarray(sample.loss_mask, np.bool_) & counts)
