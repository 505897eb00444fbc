"""The metadata of a GGUF file describe the same model as its config.json."""

import dataclasses
import json

import pytest

from checkpoint_convert import read_shape
from checkpoint_convert.formats.gguf_config import gguf_shape, write_hf_config
from checkpoint_convert.formats.gguf_file import GgufTensors, llama3_rope_factors
from checkpoint_convert.shape import differing_fields
from gguf_models import ARCHITECTURES, F16, F32, Q8_0, write_gguf
from models import tiny_model

ROPE = {"rope_theta": 500_000.0, "rope_type": "llama3", "factor": 8.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config_of(gguf, folder):
    folder.mkdir()
    write_hf_config(gguf, folder)
    return folder


def refusal(gguf, folder):
    with pytest.raises(ValueError) as refused:
        config_of(gguf, folder)
    return str(refused.value)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_the_shape_of_every_family_comes_back(family, tied, tmp_path):
    unusual = {"rms_norm_eps": 3e-6, "num_hidden_layers": 3, "max_position_embeddings": 1234}
    model = tiny_model(tmp_path / "model", family, tied=tied, **unusual)
    gguf = write_gguf(tmp_path / "model.gguf", model)
    folder = config_of(gguf, tmp_path / "config")
    wanted = read_shape(model)
    if family == "mistral":  # a file calls it Llama, which computes the same
        wanted = dataclasses.replace(wanted, family="llama")
    assert read_shape(folder) == wanted
    assert not differing_fields(gguf_shape(gguf), wanted)
    GgufTensors(gguf, read_shape(folder))
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"][0].endswith("ForCausalLM")
    assert "quantization_config" not in config


@pytest.mark.parametrize(
    ("kinds", "dtype"), [((F32,), "float32"), ((F16,), "float16"), ((F16, Q8_0), "float32")]
)
def test_the_dtype_is_that_of_what_is_read(kinds, dtype, tmp_path):
    model = tiny_model(tmp_path / "model", "qwen3")
    kind = dict.fromkeys(["token_embd.weight"], kinds[-1])
    path = tmp_path / "model.gguf"
    gguf = write_gguf(path, model, kind=lambda name: kind.get(name, kinds[0]))
    config = json.loads((config_of(gguf, tmp_path / "config") / "config.json").read_text())
    assert config["dtype"] == dtype


def test_every_token_that_ends_a_turn_ends_a_completion(tmp_path):
    model = tiny_model(tmp_path / "model", "llama")
    metadata = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 1}
    gguf = write_gguf(tmp_path / "model.gguf", model, metadata=metadata)
    folder = config_of(gguf, tmp_path / "config")
    assert read_shape(folder).eos_token_ids == (1, 5)


def test_a_shared_expert_of_size_0_is_none(tmp_path):
    model, key = tiny_model(tmp_path / "model", "qwen3_moe"), "expert_shared_feed_forward_length"
    for size in (0, 48):
        gguf = write_gguf(tmp_path / f"{size}.gguf", model, metadata={f"qwen3moe.{key}": size})
        if size == 0:
            assert gguf_shape(gguf).moe == read_shape(model).moe
        else:
            assert f"{key} = 48" in refusal(gguf, tmp_path / "config")


def test_the_scaled_rope_of_llama_3_is_read_from_its_tensor(tmp_path):
    model = tiny_model(tmp_path / "model", "llama", rope_parameters=ROPE | LLAMA3)

    def edit(tensors):
        factors = llama3_rope_factors(8.0, 500_000.0, 16)
        tensors["rope_freqs.weight"] = factors.astype("f4")

    gguf = write_gguf(tmp_path / "model.gguf", model, edit=edit)
    folder = config_of(gguf, tmp_path / "config")
    assert read_shape(folder) == read_shape(model)
    GgufTensors(gguf, read_shape(folder))


@pytest.mark.parametrize(
    ("kind", "factor", "scaling"),
    [
        ("linear", 4.0, {"rope_type": "linear", "factor": 4.0}),
        (None, 4.0, {"rope_type": "linear", "factor": 4.0}),
        ("linear", 0.0, None),
        ("linear", 1.0, None),
        ("linear", None, None),
        ("none", 4.0, None),
    ],
)
def test_rope_is_scaled_as_by_llama_cpp(kind, factor, scaling, tmp_path):
    model = tiny_model(tmp_path / "model", "qwen2")
    metadata = {"qwen2.rope.scaling.type": kind, "qwen2.rope.scaling.factor": factor}
    gguf = write_gguf(tmp_path / "model.gguf", model, metadata=metadata)
    assert read_shape(config_of(gguf, tmp_path / "config")).rope_scaling == scaling


def test_other_kinds_of_rope_scaling_are_refused(tmp_path):
    model = tiny_model(tmp_path / "model", "qwen2")
    yarn = {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}
    gguf = write_gguf(tmp_path / "yarn.gguf", model, metadata=yarn)
    assert "RoPE scaling 'yarn' is not supported" in refusal(gguf, tmp_path / "yarn")


@pytest.mark.parametrize(
    ("factor", "is_refused"), [(4.0, True), (1.0, False), (0.0, False), (None, False)]
)
def test_a_linear_factor_on_top_of_the_scaled_rope_of_llama_3_is_refused(
    factor, is_refused, tmp_path
):
    model = tiny_model(tmp_path / "model", "llama", rope_parameters=ROPE | LLAMA3)

    def edit(tensors):
        tensors["rope_freqs.weight"] = llama3_rope_factors(8.0, 500_000.0, 16).astype("f4")

    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": factor}
    gguf = write_gguf(tmp_path / "model.gguf", model, metadata=metadata, edit=edit)
    if is_refused:
        said = f"{gguf} scales RoPE twice, by a tensor rope_freqs.weight and by llama.rope.scaling"
        assert refusal(gguf, tmp_path / "config").startswith(f"{said}.factor = 4.0;")
    else:
        assert gguf_shape(gguf).rope_scaling["rope_type"] == "llama3"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("attention.sliding_window", 4096, "llama.attention.sliding_window = 4096"),
        ("feed_forward_length", [96, 48], "llama.feed_forward_length = [96, 48]"),
        ("rope.dimension_count", 8, "llama.rope.dimension_count is 8"),
        ("attention.value_length", 8, "llama.attention.value_length is 8"),
    ],
)
def test_metadata_that_cannot_be_carried_over_are_named(key, value, said, tmp_path):
    model = tiny_model(tmp_path / "model", "llama")
    gguf = write_gguf(tmp_path / "model.gguf", model, metadata={f"llama.{key}": value})
    assert said in refusal(gguf, tmp_path / "config")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.head_count", 0),
        ("llama.block_count", "two"),
        ("llama.attention.key_length", 16.0),
        ("llama.rope.freq_base", "large"),
        ("llama.rope.scaling.factor", -2.0),
        ("llama.attention.layer_norm_rms_epsilon", float("nan")),
        ("tokenizer.ggml.eos_token_id", 250),
        ("tokenizer.ggml.eot_token_id", -1.0),
    ],
)
def test_a_number_of_the_metadata_that_cannot_be_is_named(key, value, tmp_path):
    model = tiny_model(tmp_path / "model", "llama")
    gguf = write_gguf(tmp_path / "model.gguf", model, metadata={key: value})
    assert refusal(gguf, tmp_path / "config").startswith(f"{gguf}: {key} is {value!r}; ")


LLAMA = ["attention.head_count", "attention.layer_norm_rms_epsilon", "context_length"]
QWEN3_MOE = ["expert_used_count", "expert_count", "expert_feed_forward_length"]
REQUIRED = [("llama", key) for key in LLAMA] + [("qwen3_moe", key) for key in QWEN3_MOE]


@pytest.mark.parametrize(("family", "key"), [*REQUIRED, ("mixtral", "expert_used_count")])
def test_no_default_of_another_model_is_taken_for_metadata_that_are_missing(family, key, tmp_path):
    model = tiny_model(tmp_path / "model", family)
    name = f"{ARCHITECTURES[family]}.{key}"
    gguf = write_gguf(tmp_path / "model.gguf", model, metadata={name: None})
    assert refusal(gguf, tmp_path / "config") == f"{gguf} has no {name} in its metadata"
