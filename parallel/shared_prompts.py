"""Which completions of a prompt go together, when those in one microbatch share its computation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parallel.alignment import Alignment
from parallel.dims import ParallelDims
from parallel.microbatches import CostModel, Plan, plan_units, room_for
from parallel.packing import is_shared, unit_length
from parallel.pipeline_schedule import makespan


@dataclass(frozen=True, kw_only=True)
class PromptGroup:
    """The completions of one prompt in an optimizer batch."""

    num_prompt_tokens: int
    responses: dict[int, int]
    """Tokens of each completion, by its index in the batch."""

    def length(self, members: Sequence[int], multiple: int) -> int:
        """Tokens of these of its completions in one microbatch, alignment included."""
        return unit_length(self.num_prompt_tokens, [self.responses[i] for i in members], multiple)

    def cost(self, members: Sequence[int], multiple: int, cost: CostModel) -> float:
        """Compute cost of the same: a shared prompt attends to itself once."""
        prompt, responses = self.num_prompt_tokens, [self.responses[i] for i in members]
        squares = sum((prompt + response) ** 2 for response in responses)
        if is_shared(prompt, responses, multiple):
            squares -= (len(members) - 1) * prompt**2
        return cost.linear * self.length(members, multiple) + cost.quadratic * squares


def plan_shared_prompts(
    groups: Sequence[PromptGroup],
    max_tokens: int,
    dims: ParallelDims,
    alignment: Alignment,
    cost: CostModel,
) -> Plan:
    """Which sequences form which microbatch of which data-parallel rank; see `plan_microbatches`.

    What is dealt are units: some completions of a prompt, of at most `max_tokens` with it. Large
    ones repeat the prompt least, and small ones can be dealt evenly. So units of at most 1, 2, 4
    and so on completions are planned, and the plan whose slowest rank is done first is taken. Units
    of 1 are the plan without sharing, so that none is slower than that.

    Raises ValueError when one sequence does not fit.
    """
    lengths = {i: g.num_prompt_tokens + n for g in groups for i, n in g.responses.items()}
    room = room_for([lengths[i] for i in sorted(lengths)], max_tokens, alignment)
    multiple, overhead = alignment.sequence, cost.linear * cost.overhead
    largest = max((len(group.responses) for group in groups), default=1)
    plans = []
    for most in [*(1 << k for k in range((largest - 1).bit_length())), largest]:
        units = _units(groups, most, room, multiple)
        tokens = [groups[number].length(members, multiple) for number, members in units]
        costs = [groups[number].cost(members, multiple, cost) for number, members in units]
        dealt = [
            [_merged([units[i] for i in microbatch]) for microbatch in rank]
            for rank in plan_units(np.array(tokens), np.array(costs), room, dims, overhead)
        ]
        plans.append((_time(dealt, groups, multiple, dims, cost), dealt))
    _, fastest = min(plans, key=lambda timed: timed[0])
    return [
        [sorted(i for members in microbatch.values() for i in members) for microbatch in rank]
        for rank in fastest
    ]


Unit = tuple[int, list[int]]
"""Number of a group, and some of its completions."""


def _units(groups: Sequence[PromptGroup], most: int, room: int, multiple: int) -> list[Unit]:
    """Cut every group into units of at most `most` completions; in order of their first ones."""
    units = [
        (number, sorted(members))
        for number, group in enumerate(groups)
        for members in _cut(group, most, room, multiple)
    ]
    return sorted(units, key=lambda unit: unit[1][0])


def _cut(group: PromptGroup, most: int, room: int, multiple: int) -> list[list[int]]:
    """Each completion, longest first, into the first unit that takes it."""
    cut: list[list[int]] = []
    for i in sorted(group.responses, key=lambda i: -group.responses[i]):
        for members in cut:
            if len(members) < most and group.length([*members, i], multiple) <= room:
                members.append(i)
                break
        else:
            cut.append([i])
    return cut


def _merged(units: Sequence[Unit]) -> dict[int, list[int]]:
    """The completions of each group in a microbatch: units of one share its prompt as well."""
    merged: dict[int, list[int]] = {}
    for number, members in units:
        merged.setdefault(number, []).extend(members)
    return merged


def _time(
    dealt: list[list[dict[int, list[int]]]],
    groups: Sequence[PromptGroup],
    multiple: int,
    dims: ParallelDims,
    cost: CostModel,
) -> float:
    """Of the slowest rank, over its microbatches in the schedule of its stages."""
    costs = np.array(
        [
            [
                cost.linear * cost.overhead
                + sum(
                    groups[number].cost(members, multiple, cost) for number, members in of.items()
                )
                for of in rank
            ]
            for rank in dealt
        ]
    )
    return float(makespan(costs, dims.pipeline, dims.virtual_pipeline).max())
