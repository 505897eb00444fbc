"""YaRN and LongRoPE in config.json: their meaning, and refused forms."""

import json
from math import log

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.phi3 import Phi3Config
from transformers.models.qwen3 import Qwen3Config

from checkpoint_convert import read_shape
from helpers.models.published import PUBLISHED_MODELS, write_config

QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 250,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
DEEPSEEK_V3 = QWEN3 | {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
}
# YaRN as in DeepSeek-V3's config.
OF_LATENTS = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DEFAULTS = YARN | {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
    "attention_factor": 0.1 * log(4.0) + 1.0,
}


MINISTRAL3 = QWEN3 | {
    "model_type": "ministral3",
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def test_a_context_ends_where_queries_would_be_scaled_by_their_positions(tmp_path):
    shape = shape_of_yarn(tmp_path, None, config=MINISTRAL3)
    assert (shape.max_position_embeddings, shape.rope_scaling["attention_factor"]) == (16384, 1.0)
    unscaled = MINISTRAL3["rope_parameters"] | {"llama_4_scaling_beta": 0.0}
    shape = shape_of_yarn(tmp_path, None, config=MINISTRAL3, rope_parameters=unscaled)
    assert shape.max_position_embeddings == 262144


def shape_of_yarn(folder, rope_scaling, *, config=QWEN3, **changes):
    config = config | {"rope_scaling": rope_scaling} | changes
    (folder / "config.json").write_text(json.dumps(config))
    return read_shape(folder)


@pytest.mark.parametrize(
    ("rope_scaling", "changes"),
    [
        (YARN, {}),
        ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}, {}),
        ({"type": "yarn", "factor": 4.0}, {"original_max_position_embeddings": 32768}),
        (None, {"rope_parameters": YARN | {"rope_theta": 1e6}}),
        (DEFAULTS, {}),
        (YARN | {"attention_factor": None, "mscale": None, "mscale_all_dim": 0}, {}),
        (YARN | {"mscale": 2.0}, {}),  # means nothing without mscale_all_dim
        (YARN | {"extrapolation_factor": 0.5, "attn_factor": 2.0}, {}),  # read by neither
    ],
    ids=str,
)
def test_every_way_to_write_the_same_yarn_is_the_same_model(tmp_path, rope_scaling, changes):
    shape = shape_of_yarn(tmp_path, rope_scaling, **changes)
    assert shape.rope_scaling == DEFAULTS
    assert shape.rope_theta == 1e6


def test_models_that_rotate_half_of_each_head_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"yarn .* a part of each head \(0\.5\)"):
        shape_of_yarn(tmp_path, YARN, model_type="glm4_moe")


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"factor": 0.5, "original_max_position_embeddings": 262144},
        {"attention_factor": 1.5},
        {"mscale": 1.0, "mscale_all_dim": 0.707},
        {"mscale": 0.707, "attention_factor": 1.25, "mscale_all_dim": 1.0},
    ],
    ids=str,
)
def test_the_attention_factor_agrees_with_transformers(tmp_path, change):
    shape = shape_of_yarn(tmp_path, YARN | change, max_position_embeddings=65536)
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](Qwen3Config.from_pretrained(tmp_path))
    assert shape.rope_scaling["attention_factor"] == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    "change",
    [{}, {"mscale": 0.707, "mscale_all_dim": 0.707}, {"factor": 0.5}],
    ids=str,
)
def test_the_attention_factor_of_latents_scales_whole_heads_as_in_transformers(tmp_path, change):
    """In transformers the factor scales the softmax, not the rotated part of a head."""
    rope = OF_LATENTS | change
    length = int(rope["factor"] * 4096)
    shape = shape_of_yarn(tmp_path, rope, config=DEEPSEEK_V3, max_position_embeddings=length)
    assert shape.rope_scaling == {
        "rope_type": "yarn",
        "factor": rope["factor"],
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
        "attention_factor": shape.rope_scaling["attention_factor"],
    }
    config = DeepseekV3Config.from_pretrained(tmp_path)
    with torch.device("meta"):
        scale = DeepseekV3Attention(config, 0).scaling
    expected = scale * shape.head_dim**0.5
    assert shape.rope_scaling["attention_factor"] ** 2 == pytest.approx(expected, rel=1e-15)
    assert ROPE_INIT_FUNCTIONS["yarn"](config)[1] == 1.0


@pytest.mark.parametrize(
    "change",
    [
        {"beta_fast": 16},
        {"beta_slow": 2},
        {"truncate": False},
        {"original_max_position_embeddings": 65536},
        {"factor": 8.0},
    ],
    ids=str,
)
def test_yarn_with_other_numbers_is_another_model(tmp_path, change):
    scaling = shape_of_yarn(tmp_path, YARN | change).rope_scaling
    assert change.items() <= scaling.items()
    assert scaling != DEFAULTS


OF_QWEN3 = [
    ({"type": "yarn"}, "yarn RoPE scaling has no factor"),
    # transformers takes 131,072 positions as the trained length, which is another model.
    ({"type": "yarn", "factor": 4.0}, "original_max_position_embeddings is None; it must be an"),
    (
        YARN | {"factor": 3.5},
        "max_position_embeddings(131072) is more than factor(3.5) * "
        "original_max_position_embeddings(32768) of yarn RoPE scaling: set it to at most 114688",
    ),
    (YARN | {"factor": None}, "factor is None"),  # transformers and vLLM disagree about it
    (YARN | {"beta_fast": None}, "beta_fast is None; it must be a finite number above 0"),
    (YARN | {"beta_slow": 0}, "beta_slow is 0"),
    (YARN | {"truncate": None}, "truncate is None; it must be true or false"),
    (YARN | {"attention_factor": 0.0}, "attention_factor is 0.0"),
    (YARN | {"mscale": -1.0, "mscale_all_dim": 1.0}, "mscale is -1.0"),
    (YARN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, only 1.0"),
]
OF_DEEPSEEK_V3 = [
    ({"mscale": 0.707}, "RoPE mscale(0.707) and mscale_all_dim(1.0) must be equal numbers for"),
    ({"mscale": None, "mscale_all_dim": None}, "RoPE mscale(None) and mscale_all_dim(None) must"),
    ({"mscale": 0, "mscale_all_dim": 0}, "mscale_all_dim is 0; it must be a finite number"),
    ({"attention_factor": 0}, "RoPE attention_factor is 0, only None is supported for latent"),
    ({"truncate": False}, "RoPE truncate is False, only True is supported for latent attention"),
    ({"factor": 39.0}, "set it to at most 159744"),
]


@pytest.mark.parametrize(
    ("config", "rope_scaling", "words"),
    [
        *((QWEN3, scaling, words) for scaling, words in OF_QWEN3),
        *((DEEPSEEK_V3, OF_LATENTS | change, words) for change, words in OF_DEEPSEEK_V3),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_yarn_with_an_ambiguous_meaning_is_refused(tmp_path, config, rope_scaling, words):
    with pytest.raises(ValueError) as error:
        shape_of_yarn(tmp_path, rope_scaling, config=config)
    assert str(error.value).startswith(str(tmp_path / "config.json"))
    assert words in str(error.value)


LONGROPE = PUBLISHED_MODELS["Phi-4-mini"]["rope_scaling"]


def test_longrope_has_the_short_factors_of_transformers_within_the_trained_length(tmp_path):
    factors = [1 + pair / 10 for pair in range(48)]
    longrope = LONGROPE | {"short_factor": factors}
    shape = read_shape(write_config(tmp_path / "model", "Phi-4-mini", rope_scaling=longrope))
    config = Phi3Config.from_pretrained(tmp_path / "model")
    _, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](config)
    assert shape.rope_scaling == {
        "rope_type": "longrope",
        "short_factor": factors,
        "attention_factor": pytest.approx(attention_factor, rel=1e-15),
    }
    assert (shape.max_position_embeddings, shape.rotary_dim, shape.head_dim) == (4096, 96, 128)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # transformers and vLLM would have different attention factors.
        ({"factor": 16.0}, "RoPE factor is 16.0, only 32.0 is supported"),
        ({"attention_factor": 1.5}, "RoPE attention_factor is 1.5, only None is supported"),
        ({"short_mscale": 1.5}, "RoPE short_mscale is 1.5, only None is supported"),
        ({"short_factor": [1.0] * 64}, "it must be a list of 48 numbers, one for each pair"),
        ({"short_factor": [0.0] * 48}, "short_factor 0 is 0.0; it must be a finite number above"),
        ({"partial_rotary_factor": 0.7}, "partial_rotary_factor is 0.7; it must be at most 1, and"),
    ],
    ids=str,
)
def test_longrope_with_an_ambiguous_meaning_is_refused(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        read_shape(write_config(tmp_path / "x", "Phi-4-mini", rope_scaling=LONGROPE | change))
