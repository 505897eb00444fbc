"""The engine on top of `transformers`, as a client sees it."""

from engines import largest_logprob_error, random_prompts, running_engine
from models import tiny_model


def test_pushed_experts_are_taken_into_the_stacks_of_the_model(tmp_path):
    before, after = (tiny_model(tmp_path / str(i), "qwen3_moe", seed=i) for i in range(2))
    with running_engine("transformers", before, tmp_path) as engine:
        engine.push(after)
        assert largest_logprob_error(after, engine.generate(random_prompts(2))) < 1e-4
