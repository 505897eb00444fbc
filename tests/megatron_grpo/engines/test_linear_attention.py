"""A vLLM whose model has linear attention: what its heads remember follows the weights."""

import pytest
from transformers import AutoTokenizer

from helpers.engines import (
    largest_error_by_version,
    largest_logprob_error,
    random_prompts,
    running_engine,
    sampling_params,
    wait_until,
)
from helpers.models import servable_model
from megatron_grpo.engines.generation import Generation
from megatron_grpo.engines.in_flight import InFlight


@pytest.mark.long
def test_completions_go_on_under_new_weights_and_prompts_have_those_of_the_last_push(tmp_path):
    models = [servable_model(tmp_path / str(seed), "qwen3_next", seed=seed) for seed in range(2)]
    with running_engine("vllm", models[0], tmp_path) as engine:
        weights = {engine.push(models[0]): models[0]}
        params = sampling_params(
            num_generations=32,
            policy_version=engine.version,
            max_completion_length=200,
            stop_token_ids=(),
        )
        asked = Generation(random_prompts(2, lengths=(20, 100)), params)
        in_flight = InFlight(engine.client(), AutoTokenizer.from_pretrained(models[0]).decode)
        before = engine.num_generated()
        try:
            in_flight.resume(engine.version)
            answered = in_flight.submit(0, asked)
            assert wait_until(lambda: engine.num_generated() > before + 1000, 60)
            in_flight.hold(engine.version + 1)
            engine.pause()
            weights[engine.push(models[1])] = models[1]
            in_flight.resume(engine.version)
            answered.result(timeout=120)
        finally:
            in_flight.end()
            in_flight.close()
        samples = asked.samples()
        assert {len(sample.spans) for sample in samples} == {2}
        assert all(largest_error_by_version(weights, sample) < 1e-4 for sample in samples[::8])
        for folder in (models[0], models[1]):
            engine.push(folder)
            samples = engine.generate(random_prompts(4, lengths=(20, 100)))
            assert largest_logprob_error(folder, samples) < 1e-4
