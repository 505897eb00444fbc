"""config.json -> ModelShape: what transformers writes, older forms, and what is refused by name."""

import json

import pytest

from checkpoint_convert import ModelShape, read_shape
from models import CONFIGS

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 250,
}


def folder_with(folder, config, generation_config=None):
    (folder / "config.json").write_text(json.dumps(config))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_what_transformers_saves_is_read_back(tmp_path, family):
    config = CONFIGS[family](
        num_hidden_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        vocab_size=250,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        eos_token_id=[7, 8],
    )
    config.save_pretrained(tmp_path)
    assert read_shape(tmp_path) == ModelShape(
        family=family,
        num_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128 if family == "qwen3" else 16,
        intermediate_size=96,
        vocab_size=250,
        tie_word_embeddings=True,
        attention_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        rope_theta=5e5,
        rope_scaling=None,
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
        eos_token_ids=(7, 8),
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_absent_keys_have_the_defaults_of_transformers(tmp_path, family):
    minimal = LLAMA | {"model_type": family, "num_attention_heads": 32}
    config = CONFIGS[family](**{k: v for k, v in minimal.items() if k != "model_type"})
    shape = read_shape(folder_with(tmp_path, minimal))
    assert shape.num_key_value_heads == config.num_key_value_heads
    assert shape.head_dim == getattr(config, "head_dim", 2)  # Qwen2: hidden_size / heads
    assert shape.rms_norm_eps == config.rms_norm_eps
    assert shape.rope_theta == config.rope_parameters["rope_theta"]
    assert shape.max_position_embeddings == config.max_position_embeddings
    assert shape.tie_word_embeddings == config.tie_word_embeddings
    eos = config.eos_token_id
    assert shape.eos_token_ids == (() if eos is None else (eos,))


def test_both_ways_to_write_rope_scaling_are_read_alike(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "oldest").mkdir()
    oldest = {"type" if k == "rope_type" else k: v for k, v in LLAMA3_ROPE.items()}
    new = LLAMA | {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 5e5}}
    shapes = [
        read_shape(folder_with(tmp_path / "new", new)),
        read_shape(
            folder_with(tmp_path / "old", LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE})
        ),
        read_shape(
            folder_with(tmp_path / "oldest", LLAMA | {"rope_theta": 5e5, "rope_scaling": oldest})
        ),
    ]
    assert shapes[0] == shapes[1] == shapes[2]
    assert shapes[0].rope_scaling == LLAMA3_ROPE
    assert shapes[0].rope_theta == 5e5


def test_the_end_tokens_of_a_chat_model_come_from_its_generation_config(tmp_path):
    folder_with(tmp_path, LLAMA | {"eos_token_id": 2}, {"eos_token_id": [5, 9]})
    assert read_shape(tmp_path).eos_token_ids == (5, 9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gemma"}, ["'gemma'", "['llama', 'qwen2', 'qwen3']"]),
        ({"attention_bias": True}, ["attention_bias is True, only False"]),
        ({"mlp_bias": True}, ["mlp_bias is True"]),
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu', only 'silu'"]),
        ({"attention_dropout": 0.1}, ["attention_dropout is 0.1"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config is {'bits': 4}"]),
        ({"model_type": "qwen2", "use_sliding_window": True}, ["use_sliding_window is True"]),
        ({"model_type": "qwen3", "attention_bias": True}, ["attention_bias is True"]),
        ({"layer_types": ["sliding_attention"] * 2}, ["['sliding_attention']"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["'yarn'", "'default', 'llama3'"]),
        (
            {"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 2.0}},
            ["RoPE low_freq_factor is 2.0, only 1.0"],
        ),
        (
            {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            ["RoPE partial_rotary_factor is 0.5"],
        ),
        ({"rope_scaling": {"rope_type": "llama3"}}, ["without its factor"]),
        ({"hidden_size": None}, ["hidden_size is None", "at least 1"]),
        ({"num_hidden_layers": "2"}, ["num_hidden_layers is '2'"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads(3)", "num_attention_heads(4)"]),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_name(tmp_path, change, words):
    with pytest.raises(ValueError) as error:
        read_shape(folder_with(tmp_path, LLAMA | change))
    for word in [*words, str(tmp_path / "config.json")]:
        assert word in str(error.value)


def test_every_refused_key_is_listed_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"hidden_act.*mlp_bias"):
        read_shape(folder_with(tmp_path, LLAMA | {"mlp_bias": True, "hidden_act": "relu"}))


@pytest.mark.parametrize(("text", "words"), [("{", "not valid JSON"), ("[1]", "holds list")])
def test_a_broken_config_is_named(tmp_path, text, words):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_shape(tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere/config\.json does not exist"):
        read_shape(tmp_path / "nowhere")
