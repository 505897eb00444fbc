"""Plans microbatches in which the completions of a prompt share the computation of the prompt."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from parallel.alignment import Alignment, is_shared, packed_length, round_up
from parallel.dims import ParallelDims
from parallel.microbatches import CostModel, Plan, microbatch_capacity, plan_items
from parallel.pipeline_sim import makespan


class Branched(NamedTuple):
    """A sequence that branches off within the response of another one, its root."""

    root: int
    """Index of the root."""
    shared: int
    """Number of tokens shared with the root."""
    own: int
    """Number of tokens after these."""


@dataclass(frozen=True, kw_only=True)
class PromptGroup:
    """The completions of one prompt in an optimizer batch."""

    num_prompt_tokens: int
    responses: dict[int, int]
    """Tokens of each completion, by its index in the batch."""
    branches: Mapping[int, Mapping[int, Branched]] = field(default_factory=dict)
    """By index of a completion, and then by their own, the sequences that branch off the completion
    or off its branches; ascending, so that a root comes first."""

    def length(self, members: Sequence[int], multiple: int) -> int:
        """Tokens that these completions take in one microbatch, alignment included."""
        responses = [self.responses[i] for i in members]
        branched = sum(self.branched_length(i, multiple) for i in members)
        return packed_length(self.num_prompt_tokens, responses, multiple) + branched

    def branched_length(self, member: int, multiple: int) -> int:
        """Tokens of the branches of one completion in `length`."""
        return sum(round_up(1 + branch.own, multiple) for branch in self._branches([member]))

    def _branches(self, members: Sequence[int]) -> Iterator[Branched]:
        return chain.from_iterable(self.branches[i].values() for i in members if i in self.branches)

    def num_tokens(self, members: Sequence[int], multiple: int) -> int:
        """`length` without the tokens that alignment adds."""
        prompt, responses = self.num_prompt_tokens, [self.responses[i] for i in members]
        branched = sum(1 + branch.own for branch in self._branches(members))
        if is_shared(prompt, responses, multiple):
            return prompt - 1 + sum(1 + response for response in responses) + branched
        return sum(prompt + response for response in responses) + branched

    def squares(self, members: Sequence[int], multiple: int) -> int:
        """Twice the pairs of tokens that attend in one microbatch; a shared prompt counts once."""
        prompt, responses = self.num_prompt_tokens, [self.responses[i] for i in members]
        squares = sum((prompt + response) ** 2 for response in responses)
        if is_shared(prompt, responses, multiple):
            squares -= (len(members) - 1) * prompt**2
        # Only own tokens of a branch attend again: its root has counted the shared ones.
        branches = self._branches(members)
        return squares + sum((b.shared + b.own) ** 2 - b.shared**2 for b in branches)

    def cost(self, members: Sequence[int], multiple: int, cost: CostModel) -> float:
        length, squares = self.length(members, multiple), self.squares(members, multiple)
        return cost.linear * length + cost.quadratic * squares


def plan_shared_prompts(
    groups: Sequence[PromptGroup],
    max_tokens: int,
    dims: ParallelDims,
    alignment: Alignment,
    cost: CostModel,
    *,
    search: bool = True,
) -> Plan:
    """Assign sequences to microbatches, with prompts shared; see `plan_microbatches`.

    An item is some completions of one prompt that take at most `max_tokens` together with it. Large
    items repeat the prompt less often; small ones can be spread more evenly. So plans are made with
    items of at most 1, 2, 4, ... completions; the fastest on its slowest rank is taken. Items of 1
    give the plan without sharing, so the result is never slower. A branch stays with its completion
    if it fits; others form groups of their own.

    Raises ValueError if a sequence does not fit.
    """
    lengths = {i: g.num_prompt_tokens + n for g in groups for i, n in g.responses.items()}
    for group in groups:
        for branches in group.branches.values():
            lengths |= {i: branch.shared + branch.own for i, branch in branches.items()}
    # Every sequence must fit alone, a branch as well: it may become a group of its own.
    capacity = microbatch_capacity([lengths[i] for i in sorted(lengths)], max_tokens, alignment)
    groups = [part for group in groups for part in _parts(group, capacity, alignment.sequence)]
    multiple, overhead = alignment.sequence, cost.linear * cost.overhead
    largest = max((len(group.responses) for group in groups), default=1)
    timed = dims if search else replace(dims, pipeline=1, virtual_pipeline=1)
    plans = []
    for most in [*(1 << k for k in range((largest - 1).bit_length())), largest]:
        items = _items(groups, most, capacity, multiple)
        tokens = [groups[number].length(members, multiple) for number, members in items]
        costs = [groups[number].cost(members, multiple, cost) for number, members in items]
        plan = plan_items(
            np.array(tokens), np.array(costs), capacity, dims, overhead, search=search
        )
        dealt = [[_merged([items[i] for i in microbatch]) for microbatch in rank] for rank in plan]
        plans.append((_time(dealt, groups, multiple, timed, cost), dealt))
    _, fastest = min(plans, key=lambda timed: timed[0])
    with_branches = {
        i: [i, *group.branches.get(i, ())] for group in groups for i in group.responses
    }
    return [
        [
            sorted(i for members in microbatch.values() for m in members for i in with_branches[m])
            for microbatch in rank
        ]
        for rank in fastest
    ]


def _parts(group: PromptGroup, capacity: int, multiple: int) -> Iterator[PromptGroup]:
    """The group with the branches that fit into a microbatch with their completion; then groups of
    the other branches, one for each place at which they branch off."""
    fits: dict[int, dict[int, Branched]] = {}
    apart: dict[tuple[int, int], dict[int, int]] = {}
    for member, branches in group.branches.items():
        fits[member] = kept = dict[int, Branched]()
        room = capacity - round_up(group.num_prompt_tokens + group.responses[member], multiple)
        for i, branch in branches.items():
            length = round_up(1 + branch.own, multiple)
            if length <= room and (branch.root == member or branch.root in kept):
                kept[i] = branch
                room -= length
            else:
                apart.setdefault((branch.root, branch.shared), {})[i] = branch.own
    yield replace(group, branches=fits)
    for (_, shared), responses in apart.items():
        yield PromptGroup(num_prompt_tokens=shared, responses=responses)


Item = tuple[int, list[int]]
"""Index of a group, and some of its completions."""


def _items(groups: Sequence[PromptGroup], most: int, capacity: int, multiple: int) -> list[Item]:
    """Cut every group into items of at most `most` completions, ordered by their first one."""
    items = [
        (number, sorted(members))
        for number, group in enumerate(groups)
        for members in _cut(group, most, capacity, multiple)
    ]
    return sorted(items, key=lambda item: item[1][0])


def _cut(group: PromptGroup, most: int, capacity: int, multiple: int) -> list[list[int]]:
    """First-fit decreasing: each completion, longest first, goes into the first item with room."""
    prompt = group.num_prompt_tokens
    cut: list[list[int]] = []
    open_items: list[tuple[list[int], int, int]] = []
    """Items below `most` completions: (members, tokens with a shared prompt, with repeats)."""
    for i in sorted(group.responses, key=lambda i: -group.responses[i]):
        branched = group.branched_length(i, multiple)
        own = round_up(1 + group.responses[i], multiple) + branched
        alone = round_up(prompt + group.responses[i], multiple) + branched
        for place, (members, shared, repeated) in enumerate(open_items):
            # `packed_length` with one more completion: both ways to pack are sums over completions.
            if min(shared + own, repeated + alone) <= capacity:
                members.append(i)
                open_items[place] = members, shared + own, repeated + alone
                break
        else:
            place, members = len(open_items), [i]
            cut.append(members)
            open_items.append((members, round_up(prompt - 1, multiple) + own, alone))
        if len(members) == most:
            del open_items[place]
    return cut


def _merged(items: Sequence[Item]) -> dict[int, list[int]]:
    """Completions of a microbatch by group: several items of one group share its prompt, too."""
    merged: dict[int, list[int]] = {}
    for number, members in items:
        merged.setdefault(number, []).extend(members)
    return merged


def _time(
    dealt: list[list[dict[int, list[int]]]],
    groups: Sequence[PromptGroup],
    multiple: int,
    dims: ParallelDims,
    cost: CostModel,
) -> float:
    """Time of the pipeline schedule on the slowest data rank."""
    costs = np.array(
        [
            [
                cost.linear * cost.overhead
                + sum(
                    groups[number].cost(members, multiple, cost)
                    for number, members in microbatch.items()
                )
                for microbatch in rank
            ]
            for rank in dealt
        ]
    )
    return float(makespan(costs, dims.pipeline, dims.virtual_pipeline).max())
