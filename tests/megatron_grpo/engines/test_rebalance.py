"""Requests are dealt equally, and those that wait move to an engine that has room."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.engines import largest_logprob_error, random_prompts, running_engine, sampling_params
from megatron_grpo.engines.dispatch import rebalance
from megatron_grpo.engines.engine import Engine
from megatron_grpo.engines.generation import CompletionRequests
from megatron_grpo.engines.http import http_client

NUM_LONG, LONG, SHORT = 60, 300, 2


@pytest.mark.parametrize(
    ("unstarted", "takers", "moved"),
    [
        ({"a": 9}, ["b"], [("a", "b", 4)]),
        ({"a": 3, "b": 8}, ["c"], [("b", "c", 3)]),
        ({"a": 1}, ["b"], []),
        ({}, [], []),
    ],
    ids=str,
)
def test_an_engine_where_none_waits_takes_its_part_of_the_longest_queue(unstarted, takers, moved):
    assert list(rebalance(unstarted, takers)) == moved


@given(
    st.lists(st.integers(1, 2000), max_size=12),
    st.integers(0, 12),
)
def test_afterwards_no_engine_has_more_than_before_and_those_that_take_have_equally_many(
    queues, num_takers
):
    unstarted = {f"giver {i}": queue for i, queue in enumerate(queues)}
    takers = [f"taker {i}" for i in range(num_takers)]
    left = unstarted | dict.fromkeys(takers, 0)
    fair = sum(queues) // max(1, len(left))
    for giver, taker, count in rebalance(unstarted, takers):
        assert giver in unstarted and taker in takers and count > 0
        left[giver] -= count
        left[taker] += count
    assert sum(left.values()) == sum(queues)
    assert all(left[taker] == fair for taker in takers)
    assert all(min(fair, queue) <= left[giver] <= queue for giver, queue in unstarted.items())


class Recorded(CompletionRequests):
    """A generation whose first samples are long; it records who answers which."""

    def __init__(self, prompts, params):
        super().__init__(prompts, params)
        self.answered_by = {}
        for number, request in self.open.items():
            request["sampling_params"]["max_tokens"] = LONG if number < NUM_LONG else SHORT

    async def take_answer(self, number, choice, url):
        assert number not in self.answered_by
        self.answered_by[number] = url
        await super().take_answer(number, choice, url)


def generated_tokens(engine):
    async def count():
        total = 0
        for url in engine.servers.base_urls:
            async with http_client(url, engine.servers.token, 5.0, 5.0) as http:
                total += (await Engine(url, http, 5.0, 5.0).counts()).generated
        return total

    return asyncio.run(count())


@pytest.mark.slow
def test_requests_that_wait_for_room_move_to_the_engine_that_had_short_ones(tied_model, tmp_path):
    params = sampling_params(
        num_generations=1, max_completion_length=LONG, stop_token_ids=[], policy_version=1
    )
    cache = {
        "num_gpu_blocks_override": 48
    }  # for three long ones, or more before they are preempted
    with running_engine("vllm", tied_model, tmp_path, num_engines=2, vllm=cache) as engine:
        engine.push(tied_model)
        before = generated_tokens(engine)
        generation = Recorded(random_prompts(2 * NUM_LONG, lengths=(5, 20)), params)
        samples = engine.client().generate(generation)
        busy, free = engine.servers.base_urls
        long = [generation.answered_by[number] for number in range(NUM_LONG)]
        assert long == sorted(long, key=[busy, free].index), "the last ones move"
        assert 3 < long.count(free) < NUM_LONG / 2
        assert [len(s.completion_ids) for s in samples] == [LONG] * NUM_LONG + [SHORT] * NUM_LONG
        assert largest_logprob_error(tied_model, samples) < 1e-4
        lost = generated_tokens(engine) - before - sum(len(s.completion_ids) for s in samples)
        assert lost < LONG, "only those move that were not started, or not a second ago"
        # Nothing is left behind by those that were taken back.
        few = CompletionRequests(random_prompts(2), replace(params, max_completion_length=SHORT))
        assert len(engine.client().generate(few)) == 2
