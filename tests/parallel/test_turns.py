"""Turns: the context ranks that split each sequence."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel import ParallelDims
from parallel.alignment import Alignment, round_up
from parallel.microbatches import CostModel
from parallel.turns import plan_turns

COST = CostModel(exchange=1.0, overhead=0.0)


def packed(lengths: list[int], members: list[int], alignment: Alignment) -> int:
    return round_up(sum(round_up(lengths[i], alignment.sequence) for i in members), alignment.total)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 190), max_size=40),
    dims=st.builds(
        ParallelDims,
        tensor=st.sampled_from([1, 2]),
        context=st.sampled_from([2, 3, 4, 8]),
        data=st.integers(1, 3),
        pipeline=st.just(2),
        virtual_pipeline=st.integers(1, 2),
    ),
)
def test_every_sequence_is_in_one_turn_and_no_rank_has_more_than_its_memory(lengths, dims):
    alignment, budget = Alignment.for_mesh(dims, sequence_parallel=True), 96 * dims.context
    ranks = plan_turns(lengths, budget, dims, alignment, COST)
    assert len(ranks) == dims.data and len({len(turns) for turns in ranks}) == 1
    assert ranks[0] and (dims.virtual_pipeline == 1 or len(ranks[0]) % dims.pipeline == 0)
    turns = [turn for own in ranks for turn in own]
    members = [i for turn in turns for microbatch in turn.microbatches for i in microbatch]
    assert sorted(members) == [*range(len(lengths))]
    for turn in turns:
        size = turn.context_size
        assert len(turn.microbatches) * size == dims.context
        for microbatch in turn.microbatches:
            tokens = packed(lengths, microbatch, alignment.for_context(size))
            assert tokens // size <= 96 and tokens % size == 0


def test_a_sequence_is_split_over_as_few_ranks_as_have_memory_for_it():
    dims = ParallelDims(context=4)
    [turns] = plan_turns(
        [400, 200, 200, 50, 90, 60, 70], 400, dims, Alignment.for_mesh(dims, False), COST
    )
    assert [(turn.context_size, turn.microbatches) for turn in turns] == [
        (4, [[0]]),
        (2, [[1], [2]]),
        (1, [[4], [6], [5], [3]]),
    ]


@pytest.mark.parametrize(
    ("lengths", "context", "most"),
    [
        ([200, *[10] * 60], 4, 1.02),
        ([1038, 435, 411, 400, 300, 300], 12, 1.1),  # blocks of 4 end inside of blocks of 6
    ],
)
def test_ranks_that_a_long_sequence_left_out_get_more_of_the_short_ones(lengths, context, most):
    dims = ParallelDims(context=context)
    alignment, cost = Alignment.for_mesh(dims, False), CostModel(quadratic=0.0, exchange=1.0)
    [turns] = plan_turns(lengths, 100 * context, dims, alignment, cost)
    work = np.zeros(context)
    for turn in turns:
        tokens = [sum(lengths[i] for i in members) for members in turn.microbatches]
        work += np.repeat(tokens, turn.context_size) / turn.context_size
    assert work.max() <= most * work.mean()


def test_where_all_ranks_are_needed_for_every_sequence_the_plan_is_the_fixed_one():
    dims = ParallelDims(context=2, data=2)
    ranks = plan_turns([100, 90, 80, 70], 100, dims, Alignment.for_mesh(dims, False), COST)
    assert {turn.context_size for turns in ranks for turn in turns} == {2}
