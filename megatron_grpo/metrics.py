"""What a step reports: numbers that do not depend on how its tokens were split over ranks."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.advantages import RewardGroups
from megatron_grpo.loss import GRPOLoss, k3
from parallel.packing import PackedBatch

AllReduce = Callable[[Tensor, dist.ReduceOp.RedOpType], None]
"""Reduces a tensor in place over the ranks that hold different tokens."""

_SUMS = (
    "tokens",
    "loss",
    "ratio",
    "approx_kl",
    "clipped_low",
    "clipped_high",
    "entropy",
    "kl",
    "rollout_gap",
    "rollout_kl",
)
_MAXIMA = ("ratio", "rollout_gap")


class TrainMetrics:
    """Token statistics of one optimizer batch, gathered microbatch by microbatch.

    Kept per sequence, because the least and largest are over sequences and context parallelism
    splits one over ranks: sums [num_sequences, quantities] that add up over microbatches and ranks,
    and two maxima. A rank that adds nothing (an earlier pipeline stage) leaves the result as it is.
    """

    def __init__(self, num_sequences: int, device: torch.device | str = "cpu") -> None:
        self.sums = torch.zeros(num_sequences, len(_SUMS), dtype=torch.float64, device=device)
        self.maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=device)
        self.losses: list[Tensor] = []
        """This rank's part of the loss of each microbatch; none before the last stage."""

    def add(
        self, batch: PackedBatch, mask: Tensor, loss: GRPOLoss, logprobs: Tensor, entropy: Tensor
    ) -> None:
        """Count the tokens of `mask` [T]: the response tokens that this rank predicted.

        `loss`, `logprobs` [T] and `entropy` [T] are what came of them. The gap between engine and
        trainer is taken under the policy that generated, where the two ought to agree.
        """
        self.losses.append(loss.total.detach())
        generating = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        gap = (generating - batch.rollout_logprobs).abs()
        ratio = loss.log_ratio.exp()
        values = {
            "tokens": torch.ones_like(ratio),
            "loss": loss.per_token,
            "ratio": ratio,
            "approx_kl": k3(torch.zeros_like(ratio), loss.log_ratio),
            "clipped_low": loss.clipped_low,
            "clipped_high": loss.clipped_high,
            "entropy": entropy,
            "kl": loss.kl,
            "rollout_gap": gap,
            "rollout_kl": k3(batch.rollout_logprobs, generating),
        }
        columns = torch.stack([values[name].double() for name in _SUMS], dim=1)
        columns = columns.where(mask[:, None], 0.0)
        # Padding has index -1 and only zeros by now: any row may take them.
        self.sums.index_add_(0, batch.sequence_index.clamp(min=0), columns)
        largest = torch.stack([values[name].double().where(mask, 0.0).amax() for name in _MAXIMA])
        self.maxima = torch.maximum(self.maxima, largest)

    def reduce(self, all_reduce: AllReduce, *, with_kl: bool) -> dict[str, float]:
        """The metrics of the whole optimizer batch, by their final names; all zero without tokens.

        `all_reduce` covers the data, context and pipeline ranks of one tensor coordinate: tensor
        ranks hold the same numbers. `with_kl` is whether there was a reference.
        """
        all_reduce(self.sums, dist.ReduceOp.SUM)
        all_reduce(self.maxima, dist.ReduceOp.MAX)
        by_sequence = dict(zip(_SUMS, self.sums.cpu().T, strict=True))
        maxima = dict(zip(_MAXIMA, self.maxima.tolist(), strict=True))
        counted = by_sequence["tokens"] > 0
        num_tokens = by_sequence["tokens"].sum().clamp(min=1)
        mean = {name: float(sums.sum() / num_tokens) for name, sums in by_sequence.items()}
        sequence = {
            name: sums[counted] / by_sequence["tokens"][counted]
            if counted.any()
            else torch.zeros(1)
            for name, sums in by_sequence.items()
        }
        metrics = {
            "loss": float(by_sequence["loss"].sum()),
            "num_response_tokens": float(by_sequence["tokens"].sum()),
            "approx_kl": mean["approx_kl"],
            "ratio/mean": mean["ratio"],
            "ratio/max": maxima["ratio"],
            "clip_ratio/region_mean": mean["clipped_low"] + mean["clipped_high"],
            "clip_ratio/low_mean": mean["clipped_low"],
            "clip_ratio/low_min": float(sequence["clipped_low"].min()),
            "clip_ratio/high_mean": mean["clipped_high"],
            "clip_ratio/high_max": float(sequence["clipped_high"].max()),
            "entropy/mean": float(sequence["entropy"].mean()),
            "entropy/min": float(sequence["entropy"].min()),
            "entropy/max": float(sequence["entropy"].max()),
            "rollout/logprob_gap_mean": mean["rollout_gap"],
            "rollout/logprob_gap_max": maxima["rollout_gap"],
            "rollout/kl": mean["rollout_kl"],
        }
        return metrics | ({"kl": mean["kl"]} if with_kl else {})


def completion_metrics(lengths: Sequence[int], truncated: Sequence[bool]) -> dict[str, float]:
    """Lengths of the completions in tokens, and the share that met the length limit."""
    return {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": sum(truncated) / len(truncated),
    }


def dialogue_metrics(num_turns: Sequence[int], finish_reasons: Sequence[str]) -> dict[str, float]:
    """Turns of the model that environments have answered; the shares of dialogues that met
    `environment.max_turns`, and whose environment failed."""
    return {
        "num_turns/mean": sum(num_turns) / len(num_turns),
        "num_turns/max": float(max(num_turns)),
        "num_turns/clipped_ratio": finish_reasons.count("max_turns") / len(finish_reasons),
        "environment/failed_ratio": finish_reasons.count("failed") / len(finish_reasons),
    }


def reward_metrics(
    rewards: Sequence[Mapping[str, float]], totals: Tensor, group_ids: Tensor, advantages: Tensor
) -> dict[str, float]:
    """Rewards of one generation of N completions, standard deviations being the sample's.

    `rewards` holds for each completion what each reward function said, `totals` [N] the weighted
    sums, `group_ids` [N] and `advantages` [N] are those of `group_advantages`. `reward_std` is the
    mean over groups of the standard deviation within.
    """
    groups = RewardGroups(totals, group_ids)
    metrics = {
        "reward": float(groups.rewards.mean()),
        "reward_std": float(groups.std().mean()),
        "frac_reward_zero_std": float((~groups.has_spread).double().mean()),
        "advantages/std": _std(advantages),
    }
    for name in rewards[0]:
        values = torch.tensor([scores[name] for scores in rewards], dtype=torch.float64)
        metrics[f"reward/{name}/mean"] = float(values.mean())
        metrics[f"reward/{name}/std"] = _std(values)
    return metrics


def _std(values: Tensor) -> float:
    return float(values.double().std()) if len(values) > 1 else 0.0
