from math import prod

import pytest

from checkpoint_convert import hf_tensors, read_shape
from helpers.published_models import NUM_PARAMETERS, write_config

# Counts of the parameters in the weight files, from the model hub, with the biases by which routers
# choose experts. GLM's and DeepSeek's are without the layer that predicts further tokens; those of
# Nemotron and the Qwens with linear attention (80B: 81.3 billion with that layer), of
# GLM-4.7-Flash, Seed-OSS, Phi-4, OLMo, Gemma, gpt-oss, MiniMax, Ministral and Kimi, of
# DeepSeek-V3.2 and of GLM-5 are of transformers' models.

LARGER = ("DeepSeek-V3", "GLM-4.5", "Kimi-K2", "Qwen3-235B-A22B", "gpt-oss-120b")
"""Seconds each, to count tensors that smaller models have, or DeepSeek-V3.2: docs/models.md has
their counts to three digits."""


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in LARGER else ()) for n in NUM_PARAMETERS],
)
def test_published_models_have_the_published_number_of_parameters(name, tmp_path):
    shape = read_shape(write_config(tmp_path, name))
    assert sum(map(prod, hf_tensors(shape).values())) == NUM_PARAMETERS[name]
