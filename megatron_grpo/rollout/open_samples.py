"""The samples in progress when weights are pushed in flight, as a checkpoint holds them.

With over-sampling, those of the groups that no generation has taken; else, those of the generations
that are not complete. They are those of an `Experience`, but may be cut: what was sampled until the
checkpoint. In the run that goes on and in one that resumes, the rest of each is asked for.

Invariants, of a checkpoint and the run that goes on from it: a group has a sample at most once; a
whole sample is never asked for again. With over-sampling, every sample is of a group among
`OpenGroups.untaken`; the age of a group counts from when it was first asked for; only a group that
becomes too old, or that dynamic sampling rejects, loses its samples.
"""

import math
from collections.abc import Mapping, Sequence

import torch

from megatron_grpo.batch.experience import Experience
from megatron_grpo.config.config import Config
from megatron_grpo.data.samples import Sample
from megatron_grpo.rollout.dynamic_sampling import ScoredGroup

Unscored = Sequence[Sample]


def may_be_saved(cfg: Config) -> bool:
    """Whether a checkpoint holds samples in progress, and so waits for none.

    No dialogues, which have environments or agents; and of a generation by itself, not the groups
    that dynamic sampling has found so far.
    """
    one_round = cfg.rollout.over_sampling > 1 or not cfg.grpo.dynamic_sample
    return cfg.rollout.in_flight_updates and one_round and not cfg.has_dialogues


def experience_of(groups: Mapping[int, ScoredGroup | Unscored]) -> Experience | None:
    """The samples of groups by the number of their prompt; None if there are none.

    Those that are not scored have no rewards and the total NaN. There are no advantages yet.
    """
    scored = [
        each if isinstance(each, ScoredGroup) else _without_score(each) for each in groups.values()
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
    """The inverse; a group of which a sample could not be scored is to be scored again."""
    groups: dict[int, ScoredGroup | Unscored] = {}
    for number in experience.group_ids.unique().tolist():
        [rows] = (experience.group_ids == number).nonzero(as_tuple=True)
        samples = [experience.samples[row] for row in rows.tolist()]
        totals = experience.totals[rows].tolist()
        rewards = [experience.rewards[row] for row in rows.tolist()]
        is_scored = not any(map(math.isnan, totals))
        groups[number] = ScoredGroup(samples, rewards, totals) if is_scored else samples
    return groups


def _without_score(samples: Unscored) -> ScoredGroup:
    return ScoredGroup(samples, [{} for _ in samples], [math.nan] * len(samples))
