"""New weights in a running vLLM."""

import pytest

from helpers.engines import largest_logprob_error, random_prompts, running_engine
from helpers.models import servable_model


@pytest.fixture(scope="module")
def untied_engine(tmp_path_factory):
    folder = servable_model(tmp_path_factory.mktemp("untied"), "llama", tied=False)
    with running_engine("vllm", folder, tmp_path_factory.mktemp("untied-logs")) as engine:
        yield engine


@pytest.fixture(scope="module")
def mixture_engine(tmp_path_factory):
    folder = servable_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe", tied=False)
    with running_engine("vllm", folder, tmp_path_factory.mktemp("mixture-logs")) as engine:
        yield engine


@pytest.fixture(scope="module")
def sigmoid_engine(tmp_path_factory):
    folder = servable_model(tmp_path_factory.mktemp("sigmoid"), "glm4_moe", tied=False)
    with running_engine("vllm", folder, tmp_path_factory.mktemp("sigmoid-logs")) as engine:
        yield engine


@pytest.fixture(scope="module")
def latent_engine(tmp_path_factory):
    folder = servable_model(tmp_path_factory.mktemp("latent"), "deepseek_v3")
    with running_engine("vllm", folder, tmp_path_factory.mktemp("latent-logs")) as engine:
        yield engine


@pytest.mark.parametrize(
    ("engine_name", "family", "tied"),
    [
        ("vllm_engine", "qwen3", True),
        # An engine more: what it would show, layouts that vLLM has loaded show as well.
        pytest.param("untied_engine", "llama", False, marks=pytest.mark.slow),
        ("mixture_engine", "qwen3_moe", False),
        ("sigmoid_engine", "glm4_moe", False),
        ("latent_engine", "deepseek_v3", False),
    ],
)
def test_after_a_push_samples_are_those_of_the_new_weights(
    request, tmp_path, engine_name, family, tied
):
    engine = request.getfixturevalue(engine_name)
    other = servable_model(tmp_path, family, tied=tied, seed=1)
    # The same prompts each time, longer than a block of the prefix cache: a cache that outlived
    # its weights would show.
    prompts = random_prompts(4, lengths=(70, 100))
    for folder in (engine.folder, other, engine.folder):
        version = engine.push(folder)
        samples = engine.generate(prompts)
        assert {s.policy_version for s in samples} == {version}
        assert largest_logprob_error(folder, samples) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "overrides"),
    [("qwen3", {"tied": True}), ("deepseek_v3", {"q_lora_rank": None}), ("glm4_moe_lite", {})],
)
def test_two_tensor_parallel_workers_take_their_shards(tmp_path, family, overrides):
    folder = servable_model(tmp_path / "model", family, **overrides)
    other = servable_model(tmp_path / "other", family, seed=1, **overrides)
    with running_engine("vllm", folder, tmp_path, tensor_parallel_size=2) as engine:
        engine.push(other)
        assert largest_logprob_error(other, engine.generate(random_prompts(4))) < 1e-4
