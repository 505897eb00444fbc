"""Requests are dealt equally, and those that wait move to an engine that has room."""

import pytest

from engines import largest_logprob_error, random_prompts, running_engine
from megatron_grpo.rollout.dealing import equal_shares, moves
from megatron_grpo.rollout.generation import Generation

NUM_LONG, LONG, SHORT = 32, 250, 2


def test_shares_are_contiguous_and_equal():
    assert equal_shares(range(7), 3) == [range(2), range(2, 4), range(4, 7)]
    assert equal_shares([], 2) == [[], []]


@pytest.mark.parametrize(
    ("queues", "moved"),
    [
        ({"a": 0, "b": 9}, [("b", "a", 4)]),
        ({"a": 3, "b": 0, "c": 8}, [("c", "b", 4)]),
        ({"a": 1, "b": 0}, []),
        ({"a": 3, "b": 9}, []),
        ({"a": 0, "b": 0}, []),
        ({}, []),
    ],
    ids=str,
)
def test_an_engine_where_none_wait_takes_half_of_the_longest_queue(queues, moved):
    assert list(moves(queues)) == moved


def test_two_engines_where_none_wait_do_not_take_the_same_requests():
    found = list(moves({"a": 0, "b": 7, "c": 0, "d": 6}))
    assert sorted((giver, count) for giver, _, count in found) == [("b", 3), ("d", 3)]
    assert {taker for _, taker, _ in found} == {"a", "c"}


class Recorded(Generation):
    """A generation whose first samples are long; it records who answers which."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.answered_by = {}
        for number, request in self.open.items():
            request["sampling_params"]["max_tokens"] = LONG if number < NUM_LONG else SHORT

    async def take(self, number, choice, url):
        assert number not in self.answered_by
        self.answered_by[number] = url
        await super().take(number, choice, url)


def test_requests_that_wait_for_long_ones_move_to_the_engine_that_had_short_ones(
    tied_model, tmp_path
):
    options = {
        "num_generations": 1,
        "temperature": 1.0,
        "max_completion_length": LONG,
        "stop_token_ids": [],
        "seed": 0,
        "step": 0,
        "policy_version": 1,
    }
    one_at_a_time = {"max_num_seqs": 1}
    with running_engine("vllm", tied_model, tmp_path, num_engines=2, vllm=one_at_a_time) as engine:
        engine.push(tied_model)
        generation = Recorded(random_prompts(2 * NUM_LONG), **options)
        samples = engine.client().generate(generation)
        busy, free = engine.servers.base_urls
        long = [generation.answered_by[number] for number in range(NUM_LONG)]
        assert {*long[: NUM_LONG // 4]} == {busy}
        assert NUM_LONG / 5 < long.count(free) < NUM_LONG * 3 / 5
        assert [len(s.completion_ids) for s in samples] == [LONG] * NUM_LONG + [SHORT] * NUM_LONG
        assert largest_logprob_error(tied_model, samples) < 1e-4
        # Nothing is left behind by those that were taken back.
        few = Generation(random_prompts(2), **options | {"max_completion_length": SHORT})
        assert engine.client().generate(few)[0].completion_ids == samples[0].completion_ids[:SHORT]
