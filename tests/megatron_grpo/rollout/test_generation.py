"""How a generation turns the answers of engines into samples, and what it keeps of them."""

import asyncio
import random
import weakref

import pytest

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.rollout.generation import Generation
from megatron_grpo.rollout.samples import Sample

PROMPTS = [Prompt(index=7 + i, token_ids=(i,), text="", row={}) for i in range(3)]
NUM_GENERATIONS, LENGTH = 2, 5


class Json(dict):
    """Unlike a dict's, its end can be watched."""


def generation() -> Generation:
    return Generation(
        PROMPTS,
        num_generations=NUM_GENERATIONS,
        temperature=1.0,
        max_completion_length=LENGTH,
        stop_token_ids=[1],
        seed=0,
        step=0,
        policy_version=4,
    )


def answer(position: int) -> Json:
    """Choices come in any order."""
    draw = random.Random(position)
    choices = [
        Json(
            index=index,
            token_ids=[draw.randrange(1000, 2000) for _ in range(LENGTH)],
            logprobs={"content": [Json(token="a", logprob=-draw.random()) for _ in range(LENGTH)]},
            finish_reason="length",
            text=f"{position} {index}",
        )
        for index in reversed(range(NUM_GENERATIONS))
    ]
    return Json(choices=choices)


def test_samples_are_in_the_order_of_prompts_and_choices_whoever_answers_first():
    requests = generation()
    for position in (2, 0, 1):
        assert asyncio.run(requests.take(position, answer(position), "http://a")) is None
    assert not requests.open and requests.engines == {"http://a"}
    assert requests.samples() == [
        Sample(
            prompt=PROMPTS[position],
            sample_index=choice["index"],
            completion_ids=tuple(choice["token_ids"]),
            logprobs=tuple(token["logprob"] for token in choice["logprobs"]["content"]),
            finish_reason="length",
            text=f"{position} {choice['index']}",
            policy_version=4,
        )
        for position in range(3)
        for choice in reversed(answer(position)["choices"])
    ]


def test_nothing_of_an_answer_is_kept_but_its_samples():
    requests, given = generation(), answer(0)
    [first, _] = given["choices"]
    watched = [weakref.ref(json) for json in (given, first, first["logprobs"]["content"][0])]
    asyncio.run(requests.take(0, given, "http://a"))
    del given, first
    assert [json() for json in watched] == [None] * 3


def test_an_answer_that_makes_no_sample_leaves_its_request_open():
    requests, given = generation(), answer(1)
    given["choices"][0]["token_ids"].pop()
    with pytest.raises(AssertionError):
        asyncio.run(requests.take(1, given, "http://a"))
    assert set(requests.open) == {0, 1, 2} and requests.engines == set()
