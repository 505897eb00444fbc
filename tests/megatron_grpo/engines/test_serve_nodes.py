"""One vLLM engine over two nodes."""

import pytest

from helpers.engines.live import largest_logprob_error, random_prompts, running_engine, served_model
from helpers.engines.nodes import TOKEN, two_nodes


@pytest.mark.slow
def test_an_engine_over_two_nodes_is_one_engine(tied_model, tmp_path):
    other = served_model(tmp_path / "other", "qwen3", tied=True, seed=1)
    with (
        two_nodes(tmp_path, f"model.path={tied_model}") as (url, _),
        running_engine(
            "vllm", tied_model, tmp_path, TOKEN, base_urls=(url,), tensor_parallel_size=2
        ) as engine,
    ):
        for model in (other, tied_model):
            engine.push(model)
            assert largest_logprob_error(model, engine.generate(random_prompts(4))) < 1e-4
