from math import prod

import pytest

from checkpoint_convert import hf_tensors, read_shape
from helpers.models.published import NUM_PARAMETERS, write_config

# Parameters in the weight files, with the routers' correction biases. The model hub states those of
# SmolLM2, Llama, Qwen2.5, Qwen3, GLM-4.5 and DeepSeek-V3 (the last two without MTP layers); the
# others are counted in transformers' models (Qwen3-Next: 81.3 billion with its MTP layer).

LARGER = ("DeepSeek-V3", "GLM-4.5", "Kimi-K2", "Qwen3-235B-A22B", "gpt-oss-120b")
"""Models that take seconds, with tensors that smaller models or DeepSeek-V3.2 have, too;
docs/models.md has their counts to three digits."""


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in LARGER else ()) for n in NUM_PARAMETERS]
)
def test_published_models_have_the_published_number_of_parameters(name, tmp_path):
    shape = read_shape(write_config(tmp_path, name))
    assert sum(map(prod, hf_tensors(shape).values())) == NUM_PARAMETERS[name]
