"""Unfinished samples in a checkpoint, for runs that push weights in flight.

A checkpoint stores the samples of incomplete generations, or with over-sampling of groups that no
generation has taken, as an `Experience`. Samples may be cut: the resumed run requests the rest of
their tokens. Of a group of dialogues it has the finished ones; the resumed run begins the others
anew.

Invariants of a checkpoint and the resumed run: a group has each sample at most once; a whole sample
is never requested again, but for failed dialogues. With over-sampling, every sample belongs to a
group of `OpenGroups.untaken`; a group's age counts from its first request; only groups that become
too old, or that dynamic sampling rejects, lose their samples.
"""

import math
from collections.abc import Mapping, Sequence

import torch

from megatron_grpo.batch.experience import Experience
from megatron_grpo.config.config import Config
from megatron_grpo.data.samples import Sample
from megatron_grpo.rollout.generation import ScoredGroup

Unscored = Sequence[Sample]


def may_be_saved(cfg: Config) -> bool:
    """Whether checkpoints hold unfinished groups, so that no save waits for generations: in-flight
    updates without rounds of dynamic sampling."""
    one_round = cfg.rollout.over_sampling > 1 or not cfg.grpo.dynamic_sample
    return cfg.rollout.in_flight_updates and one_round


def experience_of(groups: Mapping[int, ScoredGroup | Unscored]) -> Experience | None:
    """Store groups, by the number of their prompt in the stream, as an `Experience`; None without
    samples. Unscored samples get no rewards and the total NaN; advantages are 0."""
    scored = [
        each
        if isinstance(each, ScoredGroup)
        else ScoredGroup(each, [{} for _ in each], [math.nan] * len(each))
        for each in groups.values()
    ]
    samples = [sample for group in scored for sample in group.samples]
    if not samples:
        return None
    sizes = torch.tensor([len(group.samples) for group in scored])
    return Experience(
        samples=samples,
        rewards=[reward for group in scored for reward in group.rewards],
        totals=torch.tensor([t for group in scored for t in group.totals], dtype=torch.float64),
        group_ids=torch.tensor([*groups]).repeat_interleave(sizes),
        advantages=torch.zeros(len(samples), dtype=torch.float64),
    )


def groups_of(experience: Experience) -> dict[int, ScoredGroup | Unscored]:
    """Inverse of `experience_of`. A group with a failed score comes back without scores, to be
    scored again."""
    groups: dict[int, ScoredGroup | Unscored] = {}
    for number in experience.group_ids.unique().tolist():
        [rows] = (experience.group_ids == number).nonzero(as_tuple=True)
        samples = [experience.samples[row] for row in rows.tolist()]
        totals = experience.totals[rows].tolist()
        rewards = [experience.rewards[row] for row in rows.tolist()]
        is_scored = not any(map(math.isnan, totals))
        groups[number] = ScoredGroup(samples, rewards, totals) if is_scored else samples
    return groups
