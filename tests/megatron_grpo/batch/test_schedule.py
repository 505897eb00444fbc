from dataclasses import replace

import pytest
import torch

from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.batch.token_values import by_sample
from megatron_grpo.config.grpo import GRPOConfig


def test_all_iterations_of_a_generation_come_before_the_next():
    batches = BatchSchedule(
        num_generations=2, generation_batch_size=12, steps_per_generation=3, num_iterations=2
    )
    cursors = [batches.cursor(step) for step in range(8)]
    assert [(c.generation, c.iteration, c.minibatch) for c in cursors] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 0, 2),
        (0, 1, 0),
        (0, 1, 1),
        (0, 1, 2),
        (1, 0, 0),
        (1, 0, 1),
    ]
    assert [c.starts_generation for c in cursors] == [True] + [False] * 5 + [True, False]


def test_one_minibatch_is_the_generation_in_order():
    batches = BatchSchedule(num_generations=4, generation_batch_size=24)
    assert batches.minibatches(generation=0, seed=1) == [list(range(24))]


def test_shares_depend_on_seed_and_generation_and_on_nothing_else():
    batches = BatchSchedule(num_generations=4, generation_batch_size=8, steps_per_generation=2)
    # Literal orders show when another Python or machine shuffles differently.
    first = [[0, 1, 3, 4], [2, 5, 6, 7]]
    kl = torch.arange(8, dtype=torch.float64)
    assert torch.equal(by_sample([kl[places] for places in first], first), kl)
    assert batches.minibatches(generation=0, seed=42) == first
    assert batches.minibatches(generation=1, seed=42) != first
    assert batches.minibatches(generation=0, seed=43) != first


@pytest.mark.parametrize(
    "sizes, message",
    [
        (
            {"num_generations": 8, "generation_batch_size": 100},
            r"generation_batch_size 100 .*num_generations 8: use 96 or 104",
        ),
        (
            {"num_generations": 8, "generation_batch_size": 64, "steps_per_generation": 3},
            r"64 cannot be split into grpo.steps_per_generation 3 .*: use 2 or 4 steps",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers_and_a_legal_value(sizes, message):
    with pytest.raises(ValueError, match=message):
        BatchSchedule(**sizes)


def test_groups_are_dealt_whole_where_minibatches_hold_them():
    batches = BatchSchedule.of(
        GRPOConfig(
            num_generations=4,
            generation_batch_size=48,
            steps_per_generation=3,
            shared_prompts=True,
        )
    )
    shares = batches.minibatches(generation=5, seed=1)
    assert sorted(i for share in shares for i in share) == list(range(48))
    for share in shares:
        assert len(share) == 16
        assert len({i // 4 for i in share}) == 4
    assert shares != batches.minibatches(generation=6, seed=1)
    # Six completions hold one group and a half.
    small = replace(batches, generation_batch_size=24, steps_per_generation=4)
    for share in small.minibatches(generation=0, seed=1):
        assert len({i // 4 for i in share}) == 2


@pytest.mark.parametrize(
    ("updates", "interval", "due"),
    [(1, 3, [3, 6, 9, 12]), (4, 4, [4, 8, 12]), (4, 3, [4, 8, 12]), (2, 5, [6, 10]), (4, 9, [12])],
)
def test_a_save_is_due_at_the_end_of_a_generation_with_a_multiple(updates, interval, due):
    batches = BatchSchedule(num_generations=2, generation_batch_size=4, num_iterations=updates)
    assert [step for step in range(1, 13) if batches.saves_after(step, interval)] == due
