"""Keys and values that requests keep through pushes: against a real vLLM with three models."""

from functools import partial

import pytest
from transformers import AutoTokenizer

from helpers.engines.live import (
    kept_cache_error,
    largest_error_by_version,
    largest_logprob_error,
    random_prompts,
    samples_until,
    served_model,
)
from helpers.engines.sampling import routing
from megatron_grpo.data.prompts import Prompt

KEEPS = {"max_staleness": 2, "in_flight_updates": True, "recompute_kv_cache": False}


@pytest.fixture(scope="module")
def folders(tied_model, other_model, tmp_path_factory):
    """Three sets of weights for one model."""
    third = served_model(tmp_path_factory.mktemp("third"), "qwen3", tied=True, seed=2)
    return [tied_model, other_model, third]


@pytest.fixture
def engine(live_engine, monkeypatch):
    if live_engine.rollout.engine == "sglang":
        pytest.skip("SGLang drops no prefixes while requests run")
    keeps = live_engine.rollout.model_copy(update=KEEPS)
    monkeypatch.setattr(live_engine, "rollout", keeps)
    return live_engine


@pytest.fixture
def router(engine, folders):
    engine.push(folders[0])
    decode = partial(AutoTokenizer.from_pretrained(folders[0]).decode, skip_special_tokens=True)
    with routing(engine.client(**KEEPS), decode) as router:
        router.resume(engine.version)
        yield router


LONG = {"num_generations": 8, "max_completion_length": 400, "stop_token_ids": ()}


@pytest.mark.long
def test_kept_keys_belong_to_the_weights_that_computed_them(engine, router, folders):
    weights, prompts = {engine.version: folders[0]}, random_prompts(2, lengths=(40, 80))
    asked, answered = [], []

    def ask():
        asked.append(engine.ask(prompts, len(asked), **LONG))
        answered.append(router.submit(asked[-1]))

    def made_through_pushes():
        first = len(asked)
        ask()
        for folder in folders[1:]:
            ask()  # shortly before the pause, and after the push
            weights[engine.push_in_flight(router, folder, 100, answered)] = folder
            ask()
        for each in answered:
            each.result(timeout=120)
        return [sample for each in asked[first:] for sample in each.samples()]

    samples = samples_until(lambda sample: len(sample.spans) == 3, made_through_pushes)
    assert 1 in {len(sample.spans) for sample in samples}
    crossed = [sample for sample in samples if len(sample.spans) == 3]
    checked = crossed[:8] + samples[::8]
    assert all(kept_cache_error(weights, sample) < 1e-3 for sample in checked)
    assert largest_error_by_version(weights, crossed[0]) > 0.1  # keys of other weights differ


@pytest.mark.long
def test_new_prompts_are_served_no_keys_of_older_weights(engine, router, folders):
    [prompt] = random_prompts(1)

    def made_through_a_push():
        engine.push_in_flight(router, folders[0], 0, [])
        asked = engine.ask([prompt], **LONG | {"num_generations": 16})
        answered = router.submit(asked)
        engine.push_in_flight(router, folders[1], 200, [answered])
        answered.result(timeout=200)
        return asked.samples()

    samples = samples_until(lambda sample: len(sample.spans) == 2, made_through_a_push)
    crossed = [sample for sample in samples if len(sample.spans) == 2][:8]
    turns = [
        Prompt(index=0, token_ids=(*prompt.token_ids, *sample.completion_ids), text="", row={})
        for sample in crossed
    ]
    for number in (1, 2):  # the second request hits blocks that the first has cached
        few = {"num_generations": 1, "max_completion_length": 4}
        again = engine.ask(turns, number, **LONG | few)
        router.submit(again).result(timeout=60)
        assert largest_logprob_error(folders[1], again.samples()) < 1e-3
