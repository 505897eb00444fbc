from math import prod

import pytest

from checkpoint_convert import hf_tensors, read_shape
from helpers.published_models import write_config

# Counts of the parameters in the weight files, from the model hub, with the biases by which routers
# choose experts. GLM's and DeepSeek's are without the
# layer that predicts further tokens; those of Nemotron and the Qwens with linear attention (80B:
# 81.3 billion with that layer), of GLM-4.7-Flash and from Seed-OSS to Kimi-K2, of DeepSeek-V3.2 and
# of GLM-5 are of transformers' models.
NUM_PARAMETERS = {
    "SmolLM2-135M": 134_515_008,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.3-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Qwen2.5-72B": 72_706_203_648,
    "DeepSeek-R1-Distill-Qwen-32B": 32_763_876_352,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Nemotron-3-Nano-30B-A3B": 31_577_940_288,
    "Qwen3-Next-80B-A3B": 79_674_391_296,
    "Qwen3.5-9B": 8_953_803_264,
    "Qwen3.5-35B-A3B": 34_660_610_688,
    "GLM-4.7-Flash": 29_943_393_920,
    "GLM-4.5-Air": 106_852_251_264,
    "GLM-4.5": 352_797_829_024,
    "Seed-OSS-36B": 36_151_104_512,
    "Phi-4": 14_659_507_200,
    "OLMo-2-7B": 7_298_617_344,
    "OLMo-3-7B": 7_298_011_136,
    "Gemma-3-1B": 999_885_952,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "MiniMax-M2": 228_689_764_864,
    "Ministral-3-8B": 8_489_553_920,
    "Kimi-K2": 1_026_408_232_448,
    "DeepSeek-V3": 671_026_419_200,
    "DeepSeek-V3.2": 671_877_944_064,
    "GLM-5": 743_911_218_432,
}


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
