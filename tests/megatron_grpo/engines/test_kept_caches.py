"""Keys and values that requests keep through pushes: against a real vLLM with three models."""

from functools import partial

import pytest
from transformers import AutoTokenizer

from helpers.engines import (
    kept_cache_error,
    largest_error_by_version,
    largest_logprob_error,
    random_prompts,
    sampling_params,
    served_model,
    wait_until,
)
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.engines.generation import Generation
from megatron_grpo.engines.in_flight import InFlight

KEEPS = {"max_staleness": 2, "in_flight_updates": True, "recompute_kv_cache": False}
BLOCK = 32
"""Tokens of a block of the cache."""


@pytest.fixture(scope="module")
def folders(tied_model, tmp_path_factory):
    """`tied_model`, and it with other weights."""
    folder = tmp_path_factory.mktemp("models")
    others = [served_model(folder / str(n), "qwen3", tied=True, seed=n) for n in (1, 2)]
    return [tied_model, *others]


@pytest.fixture
def engine(live_engine, monkeypatch):
    if live_engine.rollout.engine == "sglang":
        pytest.skip("SGLang drops no prefixes while requests run")
    keeps = live_engine.rollout.model_copy(update=KEEPS)
    monkeypatch.setattr(live_engine, "rollout", keeps)
    return live_engine


@pytest.fixture
def in_flight(engine, folders):
    engine.push(folders[0])
    decode = AutoTokenizer.from_pretrained(folders[0]).decode
    in_flight = InFlight(engine.client(**KEEPS), partial(decode, skip_special_tokens=True))
    in_flight.resume(engine.version)
    yield in_flight
    in_flight.end()
    in_flight.close()


def generation(prompts, version, num_tokens=300, number=0, num_samples=16):
    """Samples of `num_tokens` tokens; each `number` has others."""
    params = sampling_params(
        num_generations=num_samples,
        policy_version=version,
        max_completion_length=num_tokens,
        stop_token_ids=(),
        series=number,
    )
    return Generation(prompts, params)


def num_generated_after(engine, before, count):
    """Wait until the engine has generated so many more tokens."""
    assert wait_until(lambda: engine.num_generated() >= before + count, 60, 0.005)


@pytest.mark.long
def test_every_token_follows_keys_of_the_weights_that_computed_them(engine, in_flight, folders):
    weights, prompts = {engine.version: folders[0]}, random_prompts(2, lengths=(40, 80))
    asked, answered = [], []

    def ask():
        asked.append(generation(prompts, engine.version, number=len(asked)))
        answered.append(in_flight.submit(len(asked), asked[-1]))

    before = engine.num_generated()
    ask()
    for folder in folders[1:]:
        num_generated_after(engine, before, 1000)
        ask()  # just before the pause, and while it lasts
        in_flight.hold(engine.version + 1)
        engine.pause()
        ask()
        weights[engine.push(folder)] = folder
        before = engine.num_generated()
        in_flight.resume(engine.version)
    for each in answered:
        each.result(timeout=120)
    samples = [sample for each in asked for sample in each.samples()]
    assert {len(sample.spans) for sample in samples} == {1, 2, 3}
    assert all(kept_cache_error(weights, sample) < 1e-3 for sample in samples[::4])
    assert largest_error_by_version(weights, samples[0]) > 0.1  # keys of one version are others


@pytest.mark.long
def test_a_new_prompt_is_served_no_keys_of_older_weights(engine, in_flight, folders):
    before = engine.num_generated()
    prompts = random_prompts(1, lengths=(BLOCK + 1, BLOCK + 2))
    asked = generation(prompts, engine.version, num_tokens=3 * BLOCK, num_samples=8)
    answered = in_flight.submit(0, asked)
    num_generated_after(engine, before, 1)
    in_flight.hold(engine.version + 1)
    engine.pause()
    engine.push(folders[1])
    in_flight.resume(engine.version)
    answered.result(timeout=60)
    crossed = asked.samples()
    assert {sample.spans[0][1] < BLOCK for sample in crossed} == {True}
    turns = [
        Prompt(index=0, token_ids=(*prompts[0].token_ids, *sample.completion_ids), text="", row={})
        for sample in crossed
    ]
    for number, new in enumerate((prompts, turns), 1):  # what begins as `crossed` did comes last
        asked = generation(new, engine.version, num_tokens=4, number=number, num_samples=2)
        in_flight.submit(number, asked).result(timeout=60)
        assert largest_logprob_error(folders[1], asked.samples()) < 1e-3
