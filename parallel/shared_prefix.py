"""Plans microbatches in which the completions of a prompt share the computation of the prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parallel.alignment import Alignment, is_shared, packed_length, round_up
from parallel.dims import ParallelDims
from parallel.microbatches import CostModel, Plan, microbatch_capacity, plan_items
from parallel.pipeline_sim import makespan


@dataclass(frozen=True, kw_only=True)
class PromptGroup:
    """The completions of one prompt in an optimizer batch."""

    num_prompt_tokens: int
    responses: dict[int, int]
    """Tokens of each completion, by its index in the batch."""

    def length(self, members: Sequence[int], multiple: int) -> int:
        """Tokens that these completions take in one microbatch, alignment included."""
        return packed_length(self.num_prompt_tokens, [self.responses[i] for i in members], multiple)

    def num_tokens(self, members: Sequence[int], multiple: int) -> int:
        """The same without the tokens that alignment adds."""
        prompt, responses = self.num_prompt_tokens, [self.responses[i] for i in members]
        if is_shared(prompt, responses, multiple):
            return prompt - 1 + sum(1 + response for response in responses)
        return sum(prompt + response for response in responses)

    def squares(self, members: Sequence[int], multiple: int) -> int:
        """Twice the pairs of tokens that attend in one microbatch, in a prompt it shares once."""
        prompt, responses = self.num_prompt_tokens, [self.responses[i] for i in members]
        squares = sum((prompt + response) ** 2 for response in responses)
        if is_shared(prompt, responses, multiple):
            squares -= (len(members) - 1) * prompt**2
        return squares

    def cost(self, members: Sequence[int], multiple: int, cost: CostModel) -> float:
        """Compute cost of these completions."""
        length, squares = self.length(members, multiple), self.squares(members, multiple)
        return cost.linear * length + cost.quadratic * squares


def plan_shared_prompts(
    groups: Sequence[PromptGroup],
    max_tokens: int,
    dims: ParallelDims,
    alignment: Alignment,
    cost: CostModel,
) -> Plan:
    """Which sequences form which microbatch of which data-parallel rank; see `plan_microbatches`.

    An item is some completions of one prompt that take at most `max_tokens` together with it. Large
    items repeat the prompt less often; small ones can be spread more evenly. So plans are made
    with items of at most 1, 2, 4, ... completions, and the one whose slowest rank finishes first is
    taken. Items of 1 give the plan without sharing, so the result is never slower than that.

    Raises ValueError if a sequence does not fit.
    """
    lengths = {i: g.num_prompt_tokens + n for g in groups for i, n in g.responses.items()}
    capacity = microbatch_capacity([lengths[i] for i in sorted(lengths)], max_tokens, alignment)
    multiple, overhead = alignment.sequence, cost.linear * cost.overhead
    largest = max((len(group.responses) for group in groups), default=1)
    plans = []
    for most in [*(1 << k for k in range((largest - 1).bit_length())), largest]:
        items = _items(groups, most, capacity, multiple)
        tokens = [groups[number].length(members, multiple) for number, members in items]
        costs = [groups[number].cost(members, multiple, cost) for number, members in items]
        dealt = [
            [_merged([items[i] for i in microbatch]) for microbatch in rank]
            for rank in plan_items(np.array(tokens), np.array(costs), capacity, dims, overhead)
        ]
        plans.append((_time(dealt, groups, multiple, dims, cost), dealt))
    _, fastest = min(plans, key=lambda timed: timed[0])
    return [
        [sorted(i for members in microbatch.values() for i in members) for microbatch in rank]
        for rank in fastest
    ]


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
    """First-fit decreasing: each completion, longest first, goes into the first item with room.

    `packed_length` is a sum over completions, so that of a larger item needs one more addend.
    """
    prompt = group.num_prompt_tokens
    cut: list[list[int]] = []
    open_items: list[tuple[list[int], int, int]] = []
    """Items of fewer than `most`, and their tokens with the prompt shared and with it repeated."""
    for i in sorted(group.responses, key=lambda i: -group.responses[i]):
        own = round_up(1 + group.responses[i], multiple)
        alone = round_up(prompt + group.responses[i], multiple)
        for place, (members, shared, repeated) in enumerate(open_items):
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
    """The completions of each group in a microbatch; items of one group share its prompt, too."""
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
    """The time that the pipeline schedule takes on the slowest data rank."""
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
