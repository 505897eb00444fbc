"""How a generation turns the answers of engines into samples, and what it keeps of them."""

import asyncio
import io
import random

import numpy as np
import pytest

from helpers.engines import sampling_params
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample, first_seed
from megatron_grpo.engines.choice import Choice, Logprobs, Token
from megatron_grpo.engines.generation import CompletionRequests

PROMPTS = [Prompt(index=7 + i, token_ids=(i,), text="", row={}) for i in range(3)]
NUM_GENERATIONS, LENGTH = 2, 5


def generation(**changes) -> CompletionRequests:
    params = sampling_params(
        num_generations=NUM_GENERATIONS, max_completion_length=LENGTH, policy_version=4, **changes
    )
    return CompletionRequests(PROMPTS, params)


def choice(number: int) -> Choice:
    draw = random.Random(number)
    return Choice(
        token_ids=[draw.randrange(1000, 2000) for _ in range(LENGTH)],
        logprobs=Logprobs([Token(-draw.random()) for _ in range(LENGTH)]),
        finish_reason="length",
        text=str(number),
        weight_versions=[],
    )


def test_every_sample_is_asked_for_alone_with_a_seed_and_a_priority_of_its_own():
    requests = generation().open
    assert list(requests) == [*range(6)] == [r["priority"] for r in requests.values()]
    assert [r["token_ids"] for r in requests.values()] == [[0], [0], [1], [1], [2], [2]]
    assert [r["sampling_params"]["seed"] for r in requests.values()] == [
        first_seed(0, 0, position) + index for position in range(3) for index in range(2)
    ]
    assert not any("n" in r["sampling_params"] for r in requests.values())


def test_samples_are_in_the_order_of_prompts_and_indices_whoever_answers_first():
    requests = generation()
    for number in (5, 2, 0, 1, 4, 3):
        assert asyncio.run(requests.take_answer(number, choice(number), "http://a")) is None
    assert not requests.open and requests.engines == {"http://a"}
    assert requests.samples() == [
        Sample(
            prompt=PROMPTS[number // 2],
            sample_index=number % 2,
            completion_ids=tuple(choice(number).token_ids),
            logprobs=tuple(choice(number).token_logprobs),
            finish_reason="length",
            text=str(number),
            policy_version=4,
        )
        for number in range(6)
    ]


@pytest.mark.parametrize("router_replay", [True, False])
def test_samples_have_routes_only_if_they_are_replayed(router_replay):
    requests, given = generation(router_replay=router_replay), choice(0)
    starts = {
        r["sampling_params"].get("routed_experts_prompt_start") for r in requests.open.values()
    }
    assert starts == ({0} if router_replay else {None})
    np.save(file := io.BytesIO(), np.zeros((LENGTH, 2, 3), np.uint8))
    given.routed_experts = file.getvalue()
    for number in range(6):
        asyncio.run(requests.take_answer(number, given, "http://a"))
    for sample in requests.samples():
        assert (sample.routes is not None) == router_replay
        if router_replay:
            np.testing.assert_array_equal(sample.routes, given.routes)
