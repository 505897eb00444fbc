"""What a step reports: numbers that do not depend on how its tokens were split over ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.algorithm.advantages import RewardGroups
from megatron_grpo.algorithm.loss import GRPOLoss
from megatron_grpo.algorithm.loss_tokens import LossTokens
from megatron_grpo.config.grpo_config import GRPOConfig

AllReduce = Callable[[Tensor, dist.ReduceOp.RedOpType], None]
"""Reduces a tensor in place over the ranks that hold different tokens."""

_BY_SEQUENCE = ("tokens", "clipped_low", "clipped_high", "entropy", "rollout_gap")
_TOTALS = (
    "loss",
    "ratio",
    "approx_kl",
    "kl",
    "rollout_kl",
    "rollout_ratio",
    "rollout_weight",
    "off_policy",
    "high_entropy",
    "stale_gap",
)
_MAXIMA = ("ratio", "rollout_gap")


@dataclass(frozen=True)
class StepReport:
    """What is known of an optimizer step: its metrics, and means over its sequences' tokens."""

    metrics: dict[str, float]
    entropy: list[float]
    """Of each sequence of the optimizer batch; NaN for one of which no token counts."""
    rollout_gap: list[float]
    """The same of the difference between the log-probabilities of trainer and engine."""


class TrainMetrics:
    """Token statistics of one optimizer batch, gathered microbatch by microbatch.

    Sums that add up over microbatches and ranks, and two maxima. What the least and largest are
    wanted of is kept per sequence, since context parallelism splits one over ranks. A rank that
    adds nothing (an earlier pipeline stage) leaves the result as it is.
    """

    def __init__(
        self,
        num_sequences: int,
        device: torch.device | str = "cpu",
        *,
        old_is_rollout: bool = False,
    ) -> None:
        size = num_sequences * len(_BY_SEQUENCE)
        self.sums = torch.zeros(size + len(_TOTALS), dtype=torch.float64, device=device)
        self.maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=device)
        self._by_sequence = self.sums[:size].view(num_sequences, len(_BY_SEQUENCE))
        self._totals = self.sums[size:]
        self._old_is_rollout = old_is_rollout
        self.losses: list[Tensor] = []
        """This rank's part of the loss of each microbatch; none before the last stage."""

    def add(self, tokens: LossTokens, loss: GRPOLoss) -> None:
        """Count the response tokens that this rank predicted, and what came of them.

        Log-probabilities of engine and trainer are compared under the policy that generated, where
        the two ought to agree, and apart from that those of the policy that generated and the
        present one: `stale_gap`. Where the old log-probabilities are the engine's own, the present
        policy stands for both.
        """
        self.losses.append(loss.total.detach())
        if not len(tokens.logprobs):
            return
        generating = tokens.logprobs.detach()
        if tokens.old_logprobs is not None and not self._old_is_rollout:
            generating = tokens.old_logprobs
        # In float64 exp holds up to 709, and of sums exp(x) - x - 1 is exact to 1e-16 per token.
        log_ratio = loss.log_ratio.double()
        mismatch = (generating - tokens.rollout_logprobs).double()
        gap = mismatch.abs()
        ratios, rollout_ratios = log_ratio.exp().sum(), mismatch.exp().sum()
        zero, num = ratios.new_zeros(()), ratios.new_full((), len(generating))
        totals = {
            "loss": loss.per_token.sum(dtype=torch.float64),
            "ratio": ratios,
            "approx_kl": ratios - num - log_ratio.sum(),
            "kl": _total(loss.kl, zero),
            "rollout_kl": rollout_ratios - num - mismatch.sum(),
            "rollout_ratio": rollout_ratios,
            "rollout_weight": _total(loss.rollout_weight, num),
            "off_policy": _total(loss.off_policy, zero),
            "high_entropy": _total(tokens.high_entropy, num),
            "stale_gap": zero if self._old_is_rollout else log_ratio.abs().sum(),
        }
        self._totals += torch.stack([totals[name] for name in _TOTALS])
        sums = {
            "tokens": tokens.sequences.lengths.double(),
            "clipped_low": tokens.sequences.local_sums(loss.clipped_low.double()),
            "clipped_high": tokens.sequences.local_sums(loss.clipped_high.double()),
            "entropy": tokens.sequences.local_sums(tokens.entropy.detach().double()),
            "rollout_gap": tokens.sequences.local_sums(gap),
        }
        # Padding and shared prompts have index -1 and only zeros: any row may take them.
        rows = tokens.sequence_index.clamp(min=0)
        found = torch.stack([sums[name] for name in _BY_SEQUENCE], dim=1)
        self._by_sequence.index_add_(0, rows, found)
        largest = torch.stack([log_ratio.amax().exp(), gap.amax()])
        self.maxima = torch.maximum(self.maxima, largest)

    def reduce(self, all_reduce: AllReduce, grpo: GRPOConfig) -> StepReport:
        """The metrics of the whole optimizer batch, by their final names; all zero without tokens.

        `all_reduce` covers the data, context and pipeline ranks of one tensor coordinate: tensor
        ranks hold the same numbers. What `grpo` has no use for is left out.
        """
        all_reduce(self.sums, dist.ReduceOp.SUM)
        all_reduce(self.maxima, dist.ReduceOp.MAX)
        sums = dict(zip(_BY_SEQUENCE, self._by_sequence.cpu().T, strict=True))
        maxima = dict(zip(_MAXIMA, self.maxima.tolist(), strict=True))
        num = float(sums["tokens"].sum().clamp(min=1))
        totals = dict(zip(_TOTALS, self._totals.tolist(), strict=True))
        totals |= {name: float(of.sum()) for name, of in sums.items()}
        mean = {name: total / num for name, total in totals.items()}
        by_sequence = {name: of / sums["tokens"] for name, of in sums.items()}
        counted = {name: _or_zero(of[sums["tokens"] > 0]) for name, of in by_sequence.items()}
        metrics = {
            "loss": totals["loss"],
            "num_response_tokens": totals["tokens"],
            "approx_kl": mean["approx_kl"],
            "ratio/mean": mean["ratio"],
            "ratio/max": maxima["ratio"],
            "clip_ratio/region_mean": mean["clipped_low"] + mean["clipped_high"],
            "clip_ratio/low_mean": mean["clipped_low"],
            "clip_ratio/low_min": float(counted["clipped_low"].min()),
            "clip_ratio/high_mean": mean["clipped_high"],
            "clip_ratio/high_max": float(counted["clipped_high"].max()),
            "entropy/mean": float(counted["entropy"].mean()),
            "entropy/min": float(counted["entropy"].min()),
            "entropy/max": float(counted["entropy"].max()),
            **_mismatch_metrics(mean, maxima),
        }
        if grpo.beta > 0:
            metrics["kl"] = mean["kl"]
        if grpo.top_entropy_quantile < 1:
            metrics["entropy/high_ratio"] = mean["high_entropy"]
        if grpo.rollout_importance_sampling_mode:
            metrics["rollout/weight_mean"] = mean["rollout_weight"]
        if grpo.off_policy_mask_threshold is not None:
            metrics["off_policy_mask_ratio"] = mean["off_policy"]
        return StepReport(
            metrics, by_sequence["entropy"].tolist(), by_sequence["rollout_gap"].tolist()
        )


def _mismatch_metrics(mean: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """How far engine and trainer are apart, its causes told apart.

    `logprob_gap` and `kl` compare the two under the same weights. Numerics leave `ratio_mean`, the
    mean of trainer over engine, near 1, however large the gap: its expectation is 1 when the tokens
    were drawn from the probabilities that the engine reports. A sampling transform that the trainer
    does not know of (temperature, top-p, penalties) moves it. `stale_gap` is what the updates since
    the generation have changed.
    """
    return {
        "rollout/logprob_gap_mean": mean["rollout_gap"],
        "rollout/logprob_gap_max": maxima["rollout_gap"],
        "rollout/kl": mean["rollout_kl"],
        "rollout/ratio_mean": mean["rollout_ratio"],
        "rollout/stale_gap_mean": mean["stale_gap"],
    }


def _total(values: Tensor | None, absent: Tensor) -> Tensor:
    """The sum in float64, or what it is known to be."""
    return absent if values is None else values.sum(dtype=torch.float64)


def _or_zero(values: Tensor) -> Tensor:
    return values if len(values) else values.new_zeros(1)


def reward_metrics(
    rewards: Sequence[Mapping[str, float]], totals: Tensor, group_ids: Tensor, advantages: Tensor
) -> dict[str, float]:
    """Rewards of one generation of N completions, standard deviations being the sample's.

    `rewards` holds for each completion what each reward function said, `totals` [N] the weighted
    sums, `group_ids` [N] and `advantages` [N] are those of `group_advantages`. `reward_std` is the
    mean over groups of the standard deviation within. A score that is NaN has failed:
    it is in no mean.
    """
    scored = ~totals.isnan()
    metrics = {"advantages/std": _std(advantages)}
    if scored.any():
        groups = RewardGroups(totals[scored], group_ids[scored])
        metrics |= {
            "reward": float(groups.rewards.mean()),
            "reward_std": float(groups.std().mean()),
            "frac_reward_zero_std": float((~groups.has_spread).double().mean()),
        }
    for name in rewards[0]:
        values = torch.tensor([scores[name] for scores in rewards], dtype=torch.float64)
        values = values[~values.isnan()]
        if len(values):
            metrics[f"reward/{name}/mean"] = float(values.mean())
            metrics[f"reward/{name}/std"] = _std(values)
    return metrics


def _std(values: Tensor) -> float:
    return float(values.double().std()) if len(values) > 1 else 0.0
