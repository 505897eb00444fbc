"""Metrics of a step; they do not depend on the distribution of tokens over ranks."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.algorithm.advantages import RewardGroups
from megatron_grpo.algorithm.loss import GRPOLoss, LossTokens
from megatron_grpo.algorithm.objectives import CLIPPED
from megatron_grpo.batch.token_log import VALUES, TokenLog, first_rows
from megatron_grpo.config.grpo import GRPOConfig
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.data.samples import Sample

AllReduce = Callable[[Tensor, dist.ReduceOp.RedOpType], None]
"""Reduces a tensor in place over the ranks that hold different tokens."""

_BY_SEQUENCE = ("tokens", "clipped_low", "clipped_high", "entropy", "rollout_gap", "rollout_masked")
_TOTALS = (
    "loss",
    "policy_loss",
    "ratio",
    "approx_kl",
    "kl",
    "rollout_kl",
    "rollout_ratio",
    "rollout_weight",
    "squared_weight",
    "off_policy",
    "high_entropy",
    "stale_gap",
)
# Minima are maxima of negated values, so that one all-reduce is enough.
_MAXIMA = ("ratio", "rollout_gap", "rollout_weight", "negative_weight", "negative_threshold")


@dataclass(frozen=True)
class StepReport:
    """Metrics of an optimizer step, and means over tokens for each sequence."""

    metrics: dict[str, float]
    entropy: list[float]
    """Mean entropy of each sequence of the optimizer batch; NaN without tokens in the loss."""
    rollout_gap: list[float]
    """Mean |trainer - engine| of log-probabilities of each sequence; NaN without tokens in the
    loss."""
    tokens: Tensor
    """[`train.log_tokens`, `token_log.VALUES`] on the CPU; see `TokenLog`."""
    logprobs: list[Tensor] = field(default_factory=list)
    """[T] of each microbatch, 0 where another rank computed them; only for batches without old
    log-probabilities that will be trained on again."""


class TrainMetrics:
    """Token statistics of one optimizer batch: sums and maxima over microbatches and ranks.

    Metrics with extremes over sequences need sums by sequence, because context parallelism splits a
    sequence over ranks. A rank without tokens changes nothing.
    """

    def __init__(
        self,
        num_sequences: int,
        device: torch.device | str = "cpu",
        *,
        values: Sequence[str] = (),
        old_is_rollout: bool = False,
        num_logged_tokens: int = 0,
    ) -> None:
        size = num_sequences * len(_BY_SEQUENCE)
        self._has_clip = not CLIPPED.isdisjoint(values)
        self._values = [name for name in values if name not in CLIPPED]
        self._names = [*_TOTALS, *(f"loss/{name}" for name in self._values)]
        num_sums = size + len(self._names)
        self.sums = torch.zeros(num_sums, dtype=torch.float64, device=device)
        self.maxima = torch.full([len(_MAXIMA)], -torch.inf, dtype=torch.float64, device=device)
        self._by_sequence = self.sums[:size].view(num_sequences, len(_BY_SEQUENCE))
        self._totals = self.sums[size:]
        self._old_is_rollout = old_is_rollout
        self.token_log = TokenLog(num_logged_tokens, device)
        self.losses: list[Tensor] = []
        """This rank's part of the loss of each microbatch; empty before the last pipeline stage."""
        self.logprobs: list[Tensor] = []
        """For the `StepReport`."""

    def add(self, tokens: LossTokens, loss: GRPOLoss) -> None:
        """Add the statistics of response tokens that this rank predicted.

        `rollout_*` compare engine and trainer under the generating policy, where both should agree;
        `stale_gap` compares the trainer's generating and current policy. With the engine's own old
        log-probabilities, the current policy stands for the generating one, and `stale_gap` is 0.
        """
        self.losses.append(loss.total.detach())
        if not len(tokens.logprobs):
            return
        generating = tokens.logprobs.detach()
        if tokens.old_logprobs is not None and not self._old_is_rollout:
            generating = tokens.old_logprobs
        # In float64, exp(x) is finite up to 709, and exp(x) - x - 1 exact to 1e-16 per token.
        log_ratio = loss.log_ratio.double()
        mismatch = (generating - tokens.rollout_logprobs).double()
        gap = mismatch.abs()
        ratios, rollout_ratios = log_ratio.exp().sum(), mismatch.exp().sum()
        weights = loss.rollout_weight
        weights = torch.ones_like(gap) if weights is None else weights.detach().double()
        high = tokens.entropy.detach() if tokens.high_entropy is None else tokens.high_entropy
        zero, num = ratios.new_zeros(()), ratios.new_full((), len(generating))
        totals = {
            "loss": loss.per_token.sum(dtype=torch.float64),
            "policy_loss": loss.policy_loss.sum(dtype=torch.float64),
            "ratio": ratios,
            "approx_kl": ratios - num - log_ratio.sum(),
            "kl": zero if loss.kl is None else loss.kl.sum(dtype=torch.float64),
            "rollout_kl": rollout_ratios - num - mismatch.sum(),
            "rollout_ratio": rollout_ratios,
            "rollout_weight": weights.sum(),
            "squared_weight": weights.square().sum(),
            "off_policy": zero if loss.off_policy is None else loss.off_policy.double().sum(),
            "high_entropy": (high > -torch.inf).sum(dtype=torch.float64),
            "stale_gap": zero if self._old_is_rollout else log_ratio.abs().sum(),
        }
        totals |= {f"loss/{name}": loss.values[name].double().sum() for name in self._values}
        self._totals += torch.stack([totals[name] for name in self._names])
        sums = {
            "tokens": tokens.sequences.lengths.double(),
            "clipped_low": tokens.sequences.local_sums(loss.clipped_low.double()),
            "clipped_high": tokens.sequences.local_sums(loss.clipped_high.double()),
            "entropy": tokens.sequences.local_sums(tokens.entropy.detach().double()),
            "rollout_gap": tokens.sequences.local_sums(gap),
            "rollout_masked": tokens.sequences.local_sums((weights == 0).double()),
        }
        # Padding and shared prompts have index -1 and only zeros: adding them to row 0 is harmless.
        rows = tokens.sequence_index.clamp(min=0) % len(self._by_sequence)
        found = torch.stack([sums[name] for name in _BY_SEQUENCE], dim=1)
        self._by_sequence.index_add_(0, rows, found)
        self.token_log.add(tokens, loss, mismatch)
        largest = {
            "ratio": log_ratio.amax().exp(),
            "rollout_gap": gap.amax(),
            "rollout_weight": weights.amax(),
            "negative_weight": -weights.amin(),
            "negative_threshold": -high.masked_fill(high.isneginf(), torch.inf).amin().double(),
        }
        self.maxima = torch.maximum(self.maxima, torch.stack([largest[name] for name in _MAXIMA]))

    def reduce(self, all_reduce: AllReduce, grpo: GRPOConfig) -> StepReport:
        """Metrics of the whole optimizer batch by their final names; all zero without tokens.

        `all_reduce` covers the data, context and pipeline ranks of one tensor coordinate: tensor
        ranks hold equal numbers. Metrics of features that `grpo` disables are left out.
        """
        all_reduce(self.sums, dist.ReduceOp.SUM)
        all_reduce(self.maxima, dist.ReduceOp.MAX)
        if len(self.token_log.values):
            all_reduce(self.token_log.values, dist.ReduceOp.SUM)
        sums = dict(zip(_BY_SEQUENCE, self._by_sequence.cpu().T, strict=True))
        found = self.maxima.masked_fill(self.maxima.isneginf(), 0.0)
        maxima = dict(zip(_MAXIMA, found.tolist(), strict=True))
        totals = dict(zip(self._names, self._totals.tolist(), strict=True))
        totals |= {name: float(values.sum()) for name, values in sums.items()}
        by_sequence = {name: values / sums["tokens"] for name, values in sums.items()}
        has_tokens, none = sums["tokens"] > 0, torch.zeros(1)
        counted = {
            name: values[has_tokens] if has_tokens.any() else none
            for name, values in by_sequence.items()
        }
        return StepReport(
            _token_metrics(totals, maxima, counted, grpo, has_clip=self._has_clip),
            by_sequence["entropy"].tolist(),
            by_sequence["rollout_gap"].tolist(),
            self.token_log.values.cpu(),
            self.logprobs,
        )


def _token_metrics(
    totals: Mapping[str, float],
    maxima: Mapping[str, float],
    counted: Mapping[str, Tensor],
    grpo: GRPOConfig,
    *,
    has_clip: bool,
) -> dict[str, float]:
    """Metrics from sums and maxima over tokens, and from means of sequences with tokens.

    `clip_ratio` are shares of clipped tokens, over all tokens and as extremes over completions.
    `rollout/` is the mismatch of engine and trainer by cause: `logprob_gap` and `kl` under equal
    weights, `stale_gap` by the updates since the generation. `ratio_mean` is trainer over engine
    probability: near 1 whatever the numerics, if tokens were drawn from the probabilities that the
    engine reports. A sampling transform unknown to the trainer (top-p, penalties) moves it.
    """
    mean = {name: total / max(totals["tokens"], 1.0) for name, total in totals.items()}
    metrics = {
        "loss": totals["loss"],
        "num_response_tokens": totals["tokens"],
        "approx_kl": mean["approx_kl"],
        "ratio/mean": mean["ratio"],
        "ratio/max": maxima["ratio"],
    }
    if has_clip:
        metrics |= {
            "clip_ratio/region_mean": mean["clipped_low"] + mean["clipped_high"],
            "clip_ratio/low_mean": mean["clipped_low"],
            "clip_ratio/low_min": float(counted["clipped_low"].min()),
            "clip_ratio/high_mean": mean["clipped_high"],
            "clip_ratio/high_max": float(counted["clipped_high"].max()),
        }
    metrics |= {
        "entropy": mean["entropy"],
        "entropy/min": float(counted["entropy"].min()),
        "entropy/max": float(counted["entropy"].max()),
        "rollout/logprob_gap_mean": mean["rollout_gap"],
        "rollout/logprob_gap_max": maxima["rollout_gap"],
        "rollout/kl": mean["rollout_kl"],
        "rollout/ratio_mean": mean["rollout_ratio"],
        "rollout/stale_gap_mean": mean["stale_gap"],
    }
    metrics |= {name: value for name, value in mean.items() if name.startswith("loss/")}
    if grpo.beta > 0:
        metrics["kl"] = mean["kl"]
    if (grpo.beta > 0 and not grpo.kl_in_reward) or grpo.entropy_coef:
        metrics["policy_loss"] = totals["policy_loss"]
    if grpo.top_entropy_quantile < 1:
        metrics["entropy/high_ratio"] = mean["high_entropy"]
        metrics["entropy/threshold"] = -maxima["negative_threshold"]
    if grpo.rollout_importance_sampling_mode or grpo.rollout_rs:
        metrics |= _weight_metrics(mean, maxima, counted["rollout_masked"])
    if grpo.off_policy_mask_threshold is not None:
        metrics["off_policy_mask_ratio"] = mean["off_policy"]
    return metrics


def _weight_metrics(
    mean: Mapping[str, float], maxima: Mapping[str, float], masked: Tensor
) -> dict[str, float]:
    """Metrics of importance weights (trainer over engine, truncated or masked); `masked` is each
    sequence's share of tokens with weight 0. `eff_sample_size` is E[w]^2 / E[w^2]: 1 if all weights
    are equal, near 0 if a few outweigh the others."""
    square = mean["squared_weight"]
    return {
        "rollout/weight_mean": mean["rollout_weight"],
        "rollout/weight_min": -maxima["negative_weight"],
        "rollout/weight_max": maxima["rollout_weight"],
        "rollout/eff_sample_size": mean["rollout_weight"] ** 2 / square if square else 0.0,
        "rollout/masked_fraction": mean["rollout_masked"],
        "rollout/seq_masked_fraction": float((masked > 0).double().mean()),
    }


def reward_metrics(
    rewards: Sequence[Mapping[str, float]],
    totals: Tensor,
    group_ids: Tensor,
    advantages: Tensor,
    labels: Sequence[str],
) -> dict[str, float]:
    """Reward metrics of a generation of N completions, with sample standard deviations.

    `totals`, `group_ids` and `advantages` are [N]. `reward_std` is over all completions,
    `reward_group_std` the mean over groups. Failed scores (NaN) are excluded.
    """
    scored = ~totals.isnan()
    metrics = {
        "advantages/std": _std(advantages),
        "advantages/min": float(advantages.min()),
        "advantages/max": float(advantages.max()),
    }
    if scored.any():
        groups = RewardGroups(totals[scored], group_ids[scored])
        metrics |= {
            "reward": float(groups.rewards.mean()),
            "reward/min": float(groups.rewards.min()),
            "reward/max": float(groups.rewards.max()),
            "reward_std": _std(groups.rewards),
            "reward_group_std": float(groups.std().mean()),
            "frac_reward_zero_std": float((~groups.has_reward_variance).double().mean()),
        }
    for name in labels:
        known = [scores[name] for scores in rewards if name in scores]
        values = torch.tensor(known, dtype=torch.float64)
        values = values[~values.isnan()]
        if len(values):
            metrics[f"reward/{name}/mean"] = float(values.mean())
            metrics[f"reward/{name}/std"] = _std(values)
    return metrics


def _std(values: Tensor) -> float:
    return float(values.double().std()) if len(values) > 1 else 0.0


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peaks of torch's CUDA allocator since the last call, in GB (1e9 bytes), as maxima over all
    ranks; collective."""
    taken = [torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)]
    torch.cuda.reset_peak_memory_stats(device)
    peaks = torch.tensor(taken, dtype=torch.float64)
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    allocated, reserved = (peaks / 1e9).tolist()
    return {"perf/max_memory_allocated_gb": allocated, "perf/max_memory_reserved_gb": reserved}


def staleness_metrics(
    generation: int, samples: Sequence[Sample], updates: int, rollout: RolloutConfig
) -> dict[str, float]:
    """Mean and largest staleness of tokens: `generation` minus the generation that training with
    the sampling weights began, so from 0 to `rollout.max_staleness`.

    A generation is trained on in `updates` optimizer steps. With in-flight updates also the share
    of tokens of each staleness, of completions with several versions, and of tokens behind the
    first version of their completion.
    """
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
    """Mean log-probability gap between trainer and engine, by cause.

    `values` is the `TokenLog` of the optimizer batch `samples`, computed with the trainer's weights
    `compared_version`. A token is `current` if these weights sampled it, else `stale`. With
    `rollout.recompute_kv_cache` false, a token behind tokens of other weights in its turn is
    `current_kept_cache` or `stale_kept_cache`. So `current` measures numerics, `stale` - `current`
    the change of weights, and `current_kept_cache` - `current` outdated keys and values.
    """
    gaps = values[:, VALUES.index("gap")].abs().double().numpy()
    sums, counts = Counter[str](), Counter[str]()
    firsts = first_rows([len(sample.completion_ids) for sample in samples], len(values))
    for sample, first in zip(samples, firsts, strict=True):
        if first is None:
            continue
        # May be shorter than the completion: a full log ends within a completion.
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
    """[len(version)] bool: whether the token's turn began with another version. The prompt of a
    turn counts as of the weights that sample its first token."""
    mask = np.asarray(sample.loss_mask[: len(version)])
    begins = np.diff(mask, prepend=0) == 1
    # Index of the first token of each token's turn.
    starts = np.maximum.accumulate(np.where(begins, np.arange(len(version)), 0))
    return version != version[starts]
