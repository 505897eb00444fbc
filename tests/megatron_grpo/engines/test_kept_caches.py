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
    sampling_params,
    served_model,
)
from helpers.engines.sampling import Completions, routing
from megatron_grpo.data.prompts import Prompt

KEEPS = {"max_staleness": 2, "in_flight_updates": True, "recompute_kv_cache": False}


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
def router(engine, folders):
    engine.push(folders[0])
    decode = partial(AutoTokenizer.from_pretrained(folders[0]).decode, skip_special_tokens=True)
    with routing(engine.client(**KEEPS), decode) as router:
        router.resume(engine.version)
        yield router


def generation(prompts, version, number=0, num_samples=8, num_tokens=400):
    """Samples of `num_tokens` tokens; each `number` has others."""
    params = sampling_params(
        num_generations=num_samples,
        policy_version=version,
        max_completion_length=num_tokens,
        stop_token_ids=(),
        series=number,
    )
    return Completions(prompts, params, number)


@pytest.mark.long
def test_every_token_follows_keys_of_the_weights_that_computed_them(engine, router, folders):
    weights, prompts = {engine.version: folders[0]}, random_prompts(2, lengths=(40, 80))
    asked, answered = [], []

    def ask():
        asked.append(generation(prompts, engine.version, len(asked)))
        answered.append(router.submit(asked[-1]))

    def made_through_pushes():
        first = len(asked)
        ask()
        for folder in folders[1:]:
            ask()  # shortly before the pause, and after the push
            engine.pause_after(100, lambda: all(each.done() for each in answered))
            router.pause(engine.version + 1)
            weights[engine.push(folder)] = folder
            router.resume(engine.version)
            ask()
        for each in answered:
            each.result(timeout=120)
        return [sample for each in asked[first:] for sample in each.samples()]

    samples = samples_until(lambda sample: len(sample.spans) == 3, made_through_pushes)
    assert 1 in {len(sample.spans) for sample in samples}
    crossed = [sample for sample in samples if len(sample.spans) == 3]
    checked = crossed[:8] + samples[::8]
    assert all(kept_cache_error(weights, sample) < 1e-3 for sample in checked)
    assert largest_error_by_version(weights, crossed[0]) > 0.1  # keys of one version are others


@pytest.mark.long
def test_a_new_prompt_is_served_no_keys_of_older_weights(engine, router, folders):
    [prompt] = random_prompts(1)

    def made_through_a_push():
        router.pause(engine.version + 1)
        engine.push(folders[0])
        router.resume(engine.version)
        asked = generation([prompt], engine.version, num_samples=16)
        answered = router.submit(asked)
        engine.pause_after(200, answered.done)
        router.pause(engine.version + 1)
        engine.push(folders[1])
        router.resume(engine.version)
        answered.result(timeout=200)
        return asked.samples()

    samples = samples_until(lambda sample: len(sample.spans) == 2, made_through_a_push)
    crossed = [sample for sample in samples if len(sample.spans) == 2][:8]
    turns = [
        Prompt(index=0, token_ids=(*prompt.token_ids, *sample.completion_ids), text="", row={})
        for sample in crossed
    ]
    for number in (1, 2):  # the second finds what is cached behind blocks of the first
        again = generation(turns, engine.version, number, num_samples=1, num_tokens=4)
        router.submit(again).result(timeout=60)
        assert largest_logprob_error(folders[1], again.samples()) < 1e-3
