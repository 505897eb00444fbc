"""The simulated pipeline against an event-by-event simulation of Megatron's schedule tables."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from parallel.pipeline_sim import ABSENT, makespan, stage_operations

SIZES = [(1, 4, 1), (2, 1, 1), (4, 2, 1), (4, 9, 1), (2, 4, 2), (4, 4, 2), (4, 12, 3), (8, 16, 2)]


def event_by_event(costs, pipeline, virtual):
    """Total time if every stage runs its next operation as soon as its input is there."""
    queues = [stage_operations(s, len(costs), pipeline, virtual) for s in range(pipeline)]
    last, clock, ends = pipeline * virtual - 1, [0.0] * pipeline, {}
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                is_backward, chunk, i = queue[0]
                part = chunk * pipeline + stage
                source = part + 1 if is_backward else part - 1
                if is_backward and part == last:  # its input is its own forward
                    assert (False, part, i) in ends
                elif source >= 0 and (is_backward, source, i) not in ends:
                    break
                ready = max(clock[stage], ends.get((is_backward, source, i), 0.0))
                clock[stage] = ready + costs[i] / virtual * (2 if is_backward else 1)
                ends[is_backward, part, i] = clock[stage]
                queue.pop(0)
    return max(clock)


@settings(max_examples=80)
@given(
    pipeline=st.integers(1, 5), virtual=st.integers(1, 3), groups=st.integers(1, 3), data=st.data()
)
def test_pipeline_time_equals_an_event_simulation(pipeline, virtual, groups, data):
    virtual = virtual if pipeline > 1 else 1
    count = groups * pipeline if virtual > 1 else data.draw(st.integers(1, 12))
    row = st.lists(st.integers(0, 50), min_size=count, max_size=count)
    costs = np.array(data.draw(st.lists(row, min_size=1, max_size=3)), dtype=float)
    expected = [event_by_event(row.tolist(), pipeline, virtual) for row in costs]
    assert makespan(costs, pipeline, virtual) == pytest.approx(expected)


@pytest.mark.parametrize(("pipeline", "count", "virtual"), SIZES)
def test_absent_microbatches_at_the_end_shorten_a_row(pipeline, count, virtual):
    costs = np.random.default_rng(0).random((2, count))
    longer = np.hstack([costs, np.full((2, 2 * pipeline), ABSENT)])
    expected = makespan(costs, pipeline, virtual)
    assert makespan(longer, pipeline, virtual) == pytest.approx(expected)


@pytest.mark.parametrize(("pipeline", "count", "virtual"), SIZES)
def test_rows_take_the_same_time_together_and_alone(pipeline, count, virtual):
    costs = np.random.default_rng(0).random((35, count))
    alone = [makespan(row[None], pipeline, virtual)[0] for row in costs]
    assert makespan(costs, pipeline, virtual).tolist() == alone


@pytest.mark.parametrize(("pipeline", "count", "virtual"), SIZES)
def test_stages_follow_megatrons_schedule_table(pipeline, count, virtual, monkeypatch):
    table = get_schedule_table(count, virtual, pipeline if virtual > 1 else count)
    sizes = {
        "get_pipeline_model_parallel_world_size": pipeline,
        "get_virtual_pipeline_model_parallel_world_size": virtual if virtual > 1 else None,
    }
    for name, size in sizes.items():
        monkeypatch.setattr(parallel_state, name, lambda size=size: size)
    for stage in range(pipeline):
        monkeypatch.setattr(
            parallel_state, "get_pipeline_model_parallel_rank", lambda stage=stage: stage
        )
        _, _, ahead, _ = get_pp_rank_microbatches(count, virtual, pipeline)
        operations = stage_operations(stage, count, pipeline, virtual)
        forwards = [(i, chunk) for is_backward, chunk, i in operations if not is_backward]
        backwards = [(i, chunk) for is_backward, chunk, i in operations if is_backward]
        assert forwards == table
        assert backwards == [(i, virtual - 1 - chunk) for i, chunk in table]
        turns = [is_backward for is_backward, _, _ in operations]
        left = len(table) - ahead
        assert turns == [False] * ahead + [False, True] * left + [True] * ahead
