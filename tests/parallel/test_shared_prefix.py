"""Plans that pack completions with their shared prompt."""

import pytest

from parallel import ParallelDims
from parallel.alignment import Alignment, packed_length, round_up
from parallel.microbatches import CostModel
from parallel.shared_prefix import Branched, PromptGroup, plan_shared_prompts

COST = CostModel.transformer(4096)


def groups_of(shape: list[tuple[int, list[int]]]) -> list[PromptGroup]:
    """Groups of (prompt length, completion lengths); completions are numbered consecutively."""
    groups, first = [], 0
    for prompt, responses in shape:
        numbered = dict(enumerate(responses, start=first))
        groups.append(PromptGroup(num_prompt_tokens=prompt, responses=numbered))
        first += len(responses)
    return groups


def tokens_of(groups: list[PromptGroup], microbatch: list[int], alignment: Alignment) -> int:
    """Number of tokens of a microbatch as `pack` lays it out."""
    lengths = []
    for group in groups:
        responses = [group.responses[i] for i in microbatch if i in group.responses]
        if responses:
            lengths.append(packed_length(group.num_prompt_tokens, responses, alignment.sequence))
    return round_up(sum(lengths), alignment.total)


@pytest.mark.parametrize("alignment", [Alignment(), Alignment(sequence=4, total=16)])
@pytest.mark.parametrize(
    "dims", [ParallelDims(), ParallelDims(data=2), ParallelDims(pipeline=2, data=2)]
)
def test_every_completion_is_dealt_once_and_no_microbatch_is_too_large(dims, alignment):
    groups = groups_of([(200, [9, 80, 33, 7]), (1, [5, 5]), (90, [100, 1, 50]), (30, [12])])
    plan = plan_shared_prompts(groups, 320, dims, alignment, COST)
    assert len(plan) == dims.data
    assert sorted(i for rank in plan for microbatch in rank for i in microbatch) == list(range(10))
    for rank in plan:
        assert all(tokens_of(groups, microbatch, alignment) <= 320 for microbatch in rank)


def test_a_group_that_fits_stays_together():
    groups = groups_of([(1000, [100] * 8), (1000, [100] * 8)])
    plan = plan_shared_prompts(groups, 2000, ParallelDims(data=2), Alignment(), COST)
    assert sorted(plan) == [[[*range(8)]], [[*range(8, 16)]]]


def test_a_group_larger_than_a_microbatch_repeats_its_prompt_in_each():
    groups = groups_of([(1000, [200] * 8)])
    ((*microbatches,),) = plan_shared_prompts(groups, 1900, ParallelDims(), Alignment(), COST)
    assert sorted(map(len, microbatches)) == [4, 4]


def test_branches_are_packed_with_their_root_if_all_fits():
    branches = {
        0: {2: Branched(0, 150, 30), 3: Branched(2, 170, 10)},
        1: {4: Branched(1, 140, 900)},
    }
    group = PromptGroup(num_prompt_tokens=100, responses={0: 80, 1: 60}, branches=branches)
    assert group.num_tokens([0], 1) == 180 + 31 + 11
    assert group.squares([0], 1) == 180**2 + (180**2 - 150**2) + (180**2 - 170**2)
    assert group.length([0, 1], 8) == 104 + 88 + 64 + 32 + 16 + 904
    ((*microbatches,),) = plan_shared_prompts([group], 1100, ParallelDims(), Alignment(), COST)
    assert sorted(microbatches) == [[0, 2, 3], [1, 4]]
    ((*microbatches,),) = plan_shared_prompts([group], 1050, ParallelDims(), Alignment(), COST)
    assert sorted(microbatches) == [[0, 1, 2, 3], [4]]


def test_branches_that_do_not_fit_with_their_root_share_a_microbatch():
    branches = {0: {i: Branched(0, 10_500, 200) for i in range(1, 9)}}
    group = PromptGroup(num_prompt_tokens=1000, responses={0: 10_000}, branches=branches)
    ((*microbatches,),) = plan_shared_prompts([group], 12_200, ParallelDims(), Alignment(), COST)
    assert sorted(map(len, microbatches)) == [3, 6]  # five are with their root


def test_ranks_without_a_group_of_their_own_share_one():
    """A whole group on one rank would leave the other idle and take twice as long."""
    groups = groups_of([(100, [1000] * 8)])
    plan = plan_shared_prompts(groups, 9000, ParallelDims(data=2), Alignment(), COST)
    assert [sum(map(len, rank)) for rank in plan] == [4, 4]


def test_no_completion_is_refused_that_would_fit_alone():
    """Unshared, prompt and completion are one aligned sequence; a shared prompt has its own
    padding."""
    groups = groups_of([(9, [7]), (9, [7, 7])])
    plan = plan_shared_prompts(groups, 16, ParallelDims(), Alignment(sequence=16, total=16), COST)
    assert sorted(plan[0]) == [[0], [1], [2]]
    with pytest.raises(ValueError, match="max_tokens_per_microbatch = 15"):
        plan_shared_prompts(groups, 15, ParallelDims(), Alignment(sequence=16, total=16), COST)


def test_the_work_of_a_group_counts_its_prompt_once():
    (group,) = groups_of([(10, [3, 5])])
    assert group.num_tokens([0, 1], 1) == 9 + 4 + 6
    assert group.squares([0, 1], 1) == 13**2 + 15**2 - 10**2
    assert group.num_tokens([1], 1) == 15 and group.squares([1], 1) == 15**2


@pytest.mark.parametrize("shape", [[(1, [50])] * 8, [(50, [50] * 8)]], ids=["alone", "shared"])
def test_costly_microbatches_become_one_that_leaves_stages_idle(shape):
    cost = CostModel(overhead=1e5)
    plan = plan_shared_prompts(groups_of(shape), 500, ParallelDims(pipeline=4), Alignment(), cost)
    assert plan == [[[*range(8)]]]
