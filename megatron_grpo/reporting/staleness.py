"""Metrics of tokens that older weights sampled, and of what that changed. Rank 0 only."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from megatron_grpo.batch.token_log import VALUES, first_rows
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.data.samples import Sample


def staleness_metrics(
    generation: int, samples: Sequence[Sample], updates: int, rollout: RolloutConfig
) -> dict[str, float]:
    """Mean and largest staleness of the tokens of `generation`, in generations: how many were
    begun to be trained on between the weights that sampled a token and its own generation.

    It is at most `rollout.max_staleness`; without that there are no metrics. A generation is
    trained on in `updates` optimizer steps. If weights are pushed in flight, also the share of
    tokens of each staleness, that of completions of more than one version, and that of tokens which
    follow some of an older version in theirs.
    """
    if not rollout.max_staleness:
        return {}
    counts = Counter[int]()
    for sample in samples:
        for version, n in sample.spans:
            counts[generation - version // updates] += n
    num_tokens = counts.total()
    metrics: dict[str, float] = {
        "rollout/staleness_mean": sum(age * n for age, n in counts.items()) / num_tokens,
        "rollout/staleness_max": max(counts),
    }
    if not rollout.in_flight_updates:
        return metrics
    return metrics | {
        "rollout/mixed_versions_frac": sum(bool(s.versions) for s in samples) / len(samples),
        "rollout/mixed_versions_token_frac": sum(n for s in samples for _, n in s.spans[1:])
        / num_tokens,
        **{
            f"rollout/staleness_frac/{age}": counts[age] / num_tokens
            for age in range(rollout.max_staleness + 1)
        },
    }


def gap_metrics(
    compared_version: int, samples: Sequence[Sample], values: Tensor, rollout: RolloutConfig
) -> dict[str, float]:
    """The mean gap between trainer and engine, by what differs between them.

    `values` is the `TokenLog` of the optimizer batch `samples`; its gaps compare the engine with
    the trainer's weights `compared_version`. Tokens are `current` if those sampled them, and
    `stale` otherwise. With `rollout.recompute_kv_cache` false, tokens that follow some of other
    weights in their turn read keys and values of those: `current_kept_cache` and
    `stale_kept_cache`. So `current` is numerics, `stale` - `current` is what the weights changed,
    and `current_kept_cache` - `current` what the kept keys and values changed. Names without
    tokens in the log are left out.
    """
    if not rollout.in_flight_updates:
        return {}
    gaps = values[:, VALUES.index("gap")].abs().double().numpy()
    sums, counts = Counter[str](), Counter[str]()
    firsts = first_rows([len(sample.completion_ids) for sample in samples], len(values))
    for sample, first in zip(samples, firsts, strict=True):
        if first is None:
            continue
        own = gaps[first : first + len(sample.completion_ids)]
        versions, lengths = zip(*sample.spans, strict=True)
        version = np.repeat(versions, lengths)[: len(own)]
        counted = values[first : first + len(own), VALUES.index("mask")].numpy() > 0
        is_stale = version != compared_version
        has_kept = _follows_other_versions(sample, version) & (not rollout.recompute_kv_cache)
        for name, chosen in {
            "current": ~is_stale & ~has_kept,
            "stale": is_stale & ~has_kept,
            "current_kept_cache": ~is_stale & has_kept,
            "stale_kept_cache": is_stale & has_kept,
        }.items():
            sums[name] += own[chosen & counted].sum()
            counts[name] += int((chosen & counted).sum())
    return {
        f"rollout/logprob_gap_mean/{name}": sums[name] / count
        for name, count in counts.items()
        if count
    }


def _follows_other_versions(sample: Sample, version: np.ndarray) -> np.ndarray:
    """Whether each of the first tokens follows one of another version in its turn.

    The prompt of a turn is computed by the weights that its first token is sampled by.
    """
    mask = np.asarray(sample.loss_mask[: len(version)])
    begins = np.diff(mask, prepend=0) == 1
    starts = np.maximum.accumulate(np.where(begins, np.arange(len(version)), 0))
    return version != version[starts]
