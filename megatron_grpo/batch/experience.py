"""One generation of scored completions, their advantages, and metrics of their lengths."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add
from statistics import fmean

import torch
from torch import Tensor

from megatron_grpo.algorithm.advantages import normalized_sum_advantages, process_advantages
from megatron_grpo.batch.advantage_function import AdvantageFunction
from megatron_grpo.config.agent import AGENT
from megatron_grpo.config.config import Config
from megatron_grpo.config.reward import ENVIRONMENT
from megatron_grpo.data.samples import Sample
from megatron_grpo.rewards.scoring import total_rewards


@dataclass(frozen=True)
class Experience:
    """Scored samples of one generation; lists and tensors are parallel, and groups contiguous."""

    samples: list[Sample]
    rewards: list[dict[str, float]]
    totals: Tensor
    """[N] float64, NaN for a sample that could not be scored."""
    group_ids: Tensor
    advantages: Tensor
    """[N] float64; with process supervision, the advantage of each completion's first token."""
    token_advantages: list[Tensor] | None = None
    """[completion tokens] per sample; only with process supervision."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts and completions."""
        return sum(len(s.prompt.token_ids) + len(s.completion_ids) for s in self.samples)


def compute_advantages(
    samples: list[Sample],
    rewards: list[dict[str, float]],
    sums: Sequence[float],
    function: AdvantageFunction,
) -> Experience:
    """Compute the advantages of scored samples: from the weighted `sums` of their rewards, from the
    scores of each function (`normalize_then_sum`), or from rewards of steps. A group is all samples
    of one prompt."""
    cfg, grpo = function.cfg, function.cfg.grpo
    totals = torch.tensor(sums, dtype=torch.float64)
    group_ids = torch.tensor([sample.prompt.index for sample in samples])
    if grpo.multi_objective_aggregation == "normalize_then_sum":
        terms = cfg.reward_terms
        scores = torch.tensor(
            [[score[term.label] for term in terms] for score in rewards], dtype=torch.float64
        )
        weights = torch.tensor([term.weight for term in terms], dtype=torch.float64)
        advantages = normalized_sum_advantages(scores, weights, group_ids)
    elif grpo.supervision == "process":
        return _process_supervision(samples, rewards, totals, group_ids, cfg)
    else:
        advantages = function(totals, group_ids, samples)
    return Experience(samples, rewards, totals, group_ids, advantages)


def _process_supervision(
    samples: list[Sample],
    rewards: list[dict[str, float]],
    totals: Tensor,
    group_ids: Tensor,
    cfg: Config,
) -> Experience:
    """Compute the advantage of each token (process supervision). Rewards of steps come from the
    environment or a process reward model; the sum of the other reward functions counts at the last
    token."""
    process_model = cfg.reward.process_model
    weight = process_model.weight if process_model else cfg.environment.weight
    functions = [each for each in cfg.reward.functions if each is not process_model]
    outcomes = total_rewards(rewards, functions)
    steps = []
    for sample, outcome, total in zip(samples, outcomes, totals.tolist(), strict=True):
        found = [(token, weight * r) for token, r in sample.step_rewards]
        if functions and sample.completion_ids:
            found.append((len(sample.completion_ids) - 1, outcome))
        # The steps of a failed sample are left out.
        steps.append([] if math.isnan(total) else found)
    lengths = [len(sample.completion_ids) for sample in samples]
    by_token = process_advantages(steps, lengths, group_ids)
    # A sum over at most one value: a completion without tokens gets 0.
    advantages = torch.stack([values[:1].sum() for values in by_token])
    return Experience(samples, rewards, totals, group_ids, advantages, token_advantages=by_token)


def subtract_kl(
    experience: Experience, kl: Tensor, beta: float, function: AdvantageFunction
) -> Experience:
    """Recompute the advantages from the rewards minus `beta` times the KL divergence `kl` [N]."""
    totals = experience.totals - beta * kl
    advantages = function(totals, experience.group_ids, experience.samples)
    return replace(experience, advantages=advantages)


def completion_metrics(lengths: Sequence[int], truncated: Sequence[bool]) -> dict[str, float]:
    """Completion lengths in tokens, and the fraction that reached the length limit.

    Terminated completions are the others; without any, their lengths are 0, as in TRL.
    """
    ended = [n for n, is_cut in zip(lengths, truncated, strict=True) if not is_cut] or [0]
    return {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": sum(truncated) / len(truncated),
        "completions/mean_terminated_length": sum(ended) / len(ended),
        "completions/min_terminated_length": float(min(ended)),
        "completions/max_terminated_length": float(max(ended)),
    }


def dialogue_metrics(
    samples: Sequence[Sample], rewards: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Metrics of dialogues: turns of the model, and the fractions that failed or used all turns;
    with agents also `branch_metrics`, and means of the agents' own metrics.

    A sample is a dialogue if its `rewards` have the term of an environment or an agent.
    """
    by_term = {
        term: [sample for sample, scores in zip(samples, rewards, strict=True) if term in scores]
        for term in (ENVIRONMENT, AGENT)
    }
    metrics: dict[str, float] = {}
    if dialogues := [sample for of_term in by_term.values() for sample in of_term]:
        num_turns = [len(sample.step_rewards) for sample in dialogues]
        cut = [sample.finish_reason == "max_turns" for sample in dialogues]
        metrics |= {
            "num_turns/mean": fmean(num_turns),
            "num_turns/max": float(max(num_turns)),
            "num_turns/clipped_ratio": fmean(cut),
        }
    for term, of_term in by_term.items():
        if of_term:
            failed = [sample.finish_reason == "failed" for sample in of_term]
            metrics[f"{term}/failed_ratio"] = fmean(failed)
    if acted := by_term[AGENT]:
        metrics |= branch_metrics(acted)
        for name in sorted({name for sample in acted for name in sample.metrics}):
            values = [sample.metrics[name] for sample in acted if name in sample.metrics]
            metrics[f"agent/{name}"] = fmean(values)
    return metrics


def branch_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Number of training sequences per session of an agent, and their tokens, sampled and read."""
    num_sequences = [len(sample.sequences) for sample in samples]
    sampled, read = [], []
    for sample in samples:
        for branch in sample.sequences:
            own = sample.num_sampled
            if sample.branches:
                own = sum(sample.loss_mask[branch.start : branch.end])
            sampled.append(own)
            before = sum(end - start for start, end in branch.context)
            read.append(before + branch.end - branch.start - own)
    return {
        "agent/branches_mean": fmean(num_sequences),
        "agent/branches_max": float(max(num_sequences)),
        "agent/branch_tokens/sampled_mean": fmean(sampled),
        "agent/branch_tokens/read_mean": fmean(read),
        "agent/branch_tokens/max": float(max(map(add, sampled, read))),
    }


def source_metrics(experience: Experience) -> dict[str, float]:
    """By source of the data: share of the completions, and means of rewards (without failed ones),
    sampled tokens and turns."""
    totals = experience.totals.tolist()
    metrics: dict[str, float] = {}
    for name in sorted({sample.prompt.source for sample in experience.samples}):
        own = [i for i, each in enumerate(experience.samples) if each.prompt.source == name]
        of_own = [experience.samples[i] for i in own]
        metrics |= {
            f"source/{name}/share": len(own) / len(totals),
            f"source/{name}/completions/mean_length": fmean(each.num_sampled for each in of_own),
            f"source/{name}/num_turns/mean": fmean(
                # Without a dialogue, `step_rewards` come from a process reward model.
                max(1, len(experience.samples[i].step_rewards))
                if {AGENT, ENVIRONMENT} & experience.rewards[i].keys()
                else 1
                for i in own
            ),
        }
        if scored := [totals[i] for i in own if not math.isnan(totals[i])]:
            metrics[f"source/{name}/reward"] = fmean(scored)
    return metrics
