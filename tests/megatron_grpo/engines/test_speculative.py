"""Engines that draft, with the model's own layer or by repetition, sample as one without drafts,
also after pushes."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.engines.live import (
    largest_error_by_version,
    largest_logprob_error,
    random_prompts,
    running_engine,
    served_model,
)
from helpers.engines.sampling import routing
from helpers.models.tiny import add_mtp_layer
from megatron_grpo.engines.spec_decode_metrics import SpecDecodeMetrics

MTP = {"method": "mtp", "num_speculative_tokens": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
LIKELY = slice(4, 12)
"""Tokens that are sampled nearly always, so that some drafts are right."""


def model(folder, family, seed):
    served_model(folder, family, tied=False, seed=seed)
    weights = load_file(folder / "model.safetensors")
    scale = torch.full((len(weights["lm_head.weight"]), 1), 0.01)
    scale[LIKELY] = 20
    weights["lm_head.weight"] *= scale
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return add_mtp_layer(folder)


@pytest.fixture(
    scope="module",
    params=[
        # Linear attention keeps states of drafted tokens until they are accepted.
        ("qwen3_next", MTP),
        ("qwen3_next", None),
        pytest.param(("glm4_moe", NGRAM), marks=pytest.mark.slow),
    ],
    ids=["linear attention", "without drafts", "n-grams"],
)
def chosen(request):
    """The family of the model, and how its engine drafts; test_engine_runs.py has another."""
    return request.param


@pytest.fixture(scope="module")
def models(chosen, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return [model(folder / str(seed), chosen[0], seed) for seed in range(2)]


@pytest.fixture(scope="module")
def drafting(chosen, models, tmp_path_factory):
    table = {"speculative_config": chosen[1]} if chosen[1] else {}
    with running_engine("vllm", models[0], tmp_path_factory.mktemp("logs"), vllm=table) as engine:
        yield engine


def surprise(folder, samples):
    """Standard deviations by which the samples are less likely than the model's own samples.

    The expected -log p of a token is the entropy of its distribution.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    excess = variance = 0.0
    for sample in samples:
        completion = torch.tensor(sample.completion_ids)
        tokens = torch.tensor([[*sample.prompt.token_ids, *sample.completion_ids]])
        with torch.inference_mode():
            logits = model(tokens).logits[0, -len(completion) - 1 : -1]
        logprobs = logits.double().log_softmax(-1)
        probs, chosen = logprobs.exp(), logprobs.gather(1, completion[:, None])[:, 0]
        entropy = -(probs * logprobs).sum(-1)
        excess += float((-chosen - entropy).sum())
        variance += float(((probs * logprobs**2).sum(-1) - entropy**2).sum())
    return excess / variance**0.5


@pytest.mark.long
def test_drafting_samples_the_weights_of_the_last_push(drafting, models):
    for folder in reversed(models):  # it started with the first
        drafting.push(folder)
        samples = drafting.generate(random_prompts(8), max_completion_length=60, stop_token_ids=())
        assert largest_logprob_error(folder, samples) < 1e-3
        assert abs(surprise(folder, samples)) < 4


@pytest.mark.long
def test_spec_decode_metrics_have_shares_by_position(chosen, drafting, models):
    if not chosen[1]:
        pytest.skip("it does not draft")
    drafting.push(models[0])
    meter = SpecDecodeMetrics(drafting.client(), are_new=False)
    meter.metrics()
    drafting.generate(random_prompts(8), max_completion_length=40, stop_token_ids=())
    metrics = meter.metrics()
    length = metrics.pop("rollout/acceptance_length")
    rates = [metrics.pop(f"rollout/acceptance_rate/{n + 1}") for n in range(len(metrics))]
    assert 1 > rates[0] > rates[1] > 0
    assert length == pytest.approx(1 + sum(rates))
    assert meter.metrics() == metrics == {}


@pytest.mark.long
def test_drafting_goes_on_under_new_weights(drafting, models):
    weights = {drafting.push(models[0]): models[0]}
    # So many samples that none ends before the push.
    many = {"num_generations": 32, "max_completion_length": 200, "stop_token_ids": ()}
    asked = drafting.ask(random_prompts(2), **many)
    with routing(drafting.client(), AutoTokenizer.from_pretrained(models[0]).decode) as router:
        router.resume(drafting.version)
        answered = router.submit(asked)
        weights[drafting.push_in_flight(router, models[1], 500, [answered])] = models[1]
        answered.result(timeout=120)
    samples = asked.samples()
    assert {len(sample.spans) for sample in samples} == {2}
    assert all(largest_error_by_version(weights, sample) < 1e-3 for sample in samples[::8])
