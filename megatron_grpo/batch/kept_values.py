"""Per-token values computed when a generation began, which a resumed run must not recompute."""

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.batch.distribute import Minibatches, collect_values
from megatron_grpo.batch.experience import Experience
from megatron_grpo.config.config import Config
from parallel.groups import Groups
from parallel.packing import PackedBatch


def with_cached_values(
    experience: Experience | None,
    minibatches: Minibatches,
    indices: list[list[int]],
    cfg: Config,
    groups: Groups,
) -> Experience | None:
    """Return, on rank 0, the `experience` with the values that all ranks hold; collective.

    `indices` are the samples of each optimizer batch; `minibatches` are this rank's share of those
    batches.
    """
    known: dict[str, Any] = {
        name: _collected(experience, minibatches, indices, attrgetter(name), groups)
        for name in _names(cfg)
    }
    return replace(experience, **known) if experience else None


def _names(cfg: Config) -> list[str]:
    names = ["old_logprobs"]
    if cfg.grpo.beta > 0:
        names.append("ref_logprobs")
    if cfg.grpo.top_entropy_quantile < 1:
        names.append("high_entropy")
    return names


def _collected(
    experience: Experience | None,
    minibatches: Minibatches,
    indices: list[list[int]],
    values: Callable[[PackedBatch], Tensor | None],
    groups: Groups,
) -> list[Tensor] | None:
    """On rank 0, the `values` of every sample."""
    collected = collect_values(minibatches, values, groups)
    if collected is None or experience is None:
        return None
    found: dict[int, Tensor] = {
        indices[minibatch][place]: of_sequence
        for of_rank in collected
        for minibatch, sequences in enumerate(of_rank)
        for place, of_sequence in sequences.items()
    }
    nothing = torch.zeros(0)  # for a completion without tokens
    return [found.get(i, nothing) for i in range(len(experience.samples))]
