"""Groups turn the answers of engines into samples."""

import asyncio
import io
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from helpers.engines.live import sampling_params
from helpers.engines.sampling import Completions
from helpers.runs.rewards import sample_of
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample, first_seed
from megatron_grpo.engines.choice import Choice, Logprobs, Token
from megatron_grpo.engines.engine import ROUTES_START
from megatron_grpo.engines.group import PartnerGroup
from megatron_grpo.engines.request import Request, SamplingParams

PROMPTS = [Prompt(index=7 + i, token_ids=(i,), text="", row={}) for i in range(3)]
NUM_GENERATIONS, LENGTH = 2, 5


class Requests:
    """Stands for a router: keeps the requests; the test answers them."""

    def __init__(self) -> None:
        self.all: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self.all += requests


def params_of(**changes) -> SamplingParams:
    return sampling_params(
        num_generations=NUM_GENERATIONS, max_completion_length=LENGTH, policy_version=4, **changes
    )


async def answered(
    order: Sequence[int], given: Callable[[int], Choice], **changes
) -> tuple[list[Sample], list[Request], set[str]]:
    """(samples of all prompts, requests, engines), with the requests answered in this order."""
    router, made = Requests(), Completions(PROMPTS, params_of(**changes))
    await made.begin(router)
    await asyncio.sleep(0)
    for number in order:
        router.all[number].take(given(number), "http://a", str)
    await asyncio.gather(*made.sampling)
    return made.samples(), router.all, made.engines


def choice(number: int) -> Choice:
    draw = random.Random(number)
    return Choice(
        token_ids=[draw.randrange(1000, 2000) for _ in range(LENGTH)],
        logprobs=Logprobs([Token(-draw.random()) for _ in range(LENGTH)]),
        finish_reason="length",
        text=str(number),
        weight_versions=[],
    )


def test_samples_are_requested_one_by_one_and_keep_the_order_of_prompts():
    samples, requests, engines = asyncio.run(answered((5, 2, 0, 1, 4, 3), choice))
    bodies = [request.rest for request in requests]
    assert [body["priority"] for body in bodies] == [*range(6)]
    assert [request.body["token_ids"] for request in requests] == [[0], [0], [1], [1], [2], [2]]
    assert [request.body["sampling_params"]["seed"] for request in requests] == [
        first_seed(0, 0, position) + index for position in range(3) for index in range(2)
    ]
    assert not any("n" in body["sampling_params"] for body in bodies)
    assert engines == {"http://a"}
    assert samples == [
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
    given = choice(0)
    np.save(file := io.BytesIO(), np.zeros((LENGTH, 2, 3), np.uint8))
    given.routed_experts = file.getvalue()
    made = answered(range(6), lambda number: given, router_replay=router_replay)
    samples, requests, _ = asyncio.run(made)
    starts = {each.body["sampling_params"].get(ROUTES_START) for each in requests}
    assert starts == ({0} if router_replay else {None})
    for sample in samples:
        assert (sample.routes is not None) == router_replay
        if router_replay:
            np.testing.assert_array_equal(sample.routes, given.routes)


def test_a_group_that_is_given_up_withdraws_its_requests():
    async def give_up() -> list[Request]:
        router, made = Requests(), Completions(PROMPTS, params_of())
        await made.begin(router)
        await asyncio.sleep(0)
        for task in made.sampling:
            task.cancel()
        await asyncio.gather(*made.sampling, return_exceptions=True)
        return router.all

    assert all(request.answer.cancelled() for request in asyncio.run(give_up()))


def session(index: int, **fields: Any) -> Sample:
    return sample_of("", {}, number=index, prompt=PROMPTS[0], **fields)


class Sessions(PartnerGroup):
    async def _play(self, index: int, router: object) -> Sample:
        return session(index, policy_version=1)


def test_a_restored_group_begins_failed_sessions_anew():
    group = Sessions(PROMPTS[0], params_of(), 0)
    group.restore([session(0, finish_reason="failed"), session(1)])
    samples = asyncio.run(group.sample(Requests()))
    assert [sample.policy_version for sample in samples] == [1, 0]
