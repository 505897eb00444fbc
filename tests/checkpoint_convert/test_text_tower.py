"""The text tower of a multimodal folder: read as a text model, exported with the other towers."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from checkpoint_convert import read_shape
from checkpoint_convert.hf_export import create_export, write_weights
from checkpoint_convert.hf_to_megatron import import_checkpoint
from checkpoint_convert.megatron import file_layout
from checkpoint_convert.megatron_to_hf import export_checkpoint
from checkpoint_convert.shape import differing_fields
from checkpoint_convert.text_tower import is_of_text, text_name
from helpers.models.conversions import (
    assert_same,
    config_of,
    rank_parameters,
    variant,
    weights_of,
    with_weights,
)
from helpers.models.quantized import compressed
from helpers.models.tiny import OWN_FIELDS, tiny_model
from helpers.models.towers import CONFIGS, tiny_multimodal
from parallel import ParallelDims


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        kind: tiny_multimodal(tmp_path_factory.mktemp(kind), kind, tied=kind == "qwen3_vl")
        for kind in CONFIGS
    }


def edited(folder, copy, edit):
    """Copy a model, with its config.json edited in place."""
    shutil.copytree(folder, copy)
    config = config_of(copy)
    edit(config)
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def with_text(folder, copy, **keys):
    """Copy a model with these keys of its text_config; None removes one."""
    text = config_of(folder)["text_config"] | keys
    text = {key: value for key, value in text.items() if value is not None}
    return variant(folder, copy, text_config=text)


def trained(folder, out, dtype=torch.float32):
    """Export the model with 1 added to every weight of its text tower."""
    dims, shape = ParallelDims(tensor=2, pipeline=2), read_shape(folder)
    create_export(out, folder, shape, dtype, max_shard_bytes=200_000)
    for rank in range(dims.world_size):
        layout, tensors = rank_parameters(folder, dims, rank)
        added = {name: each + 1 for name, each in tensors.items()}
        write_weights(out, layout, added, files=file_layout(shape))


@pytest.mark.parametrize("kind", CONFIGS)
def test_export_copies_other_towers_and_names(folders, tmp_path, kind):
    trained(folders[kind], tmp_path / "out")
    expected = {
        name: each + is_of_text(text_name(name)) for name, each in weights_of(folders[kind]).items()
    }
    assert any(not is_of_text(text_name(name)) for name in expected)
    assert_same(weights_of(tmp_path / "out"), expected)


def test_export_converts_only_the_text_tower(folders, tmp_path):
    trained(folders["mistral3"], tmp_path / "out", dtype=torch.bfloat16)
    dtypes = {
        is_of_text(text_name(name)): each.dtype
        for name, each in weights_of(tmp_path / "out").items()
    }
    assert dtypes == {True: torch.bfloat16, False: torch.float32}
    config = config_of(tmp_path / "out")
    assert config["dtype"] == config["text_config"]["dtype"] == "bfloat16"


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model."])
def test_export_keeps_names_of_any_release(folders, tmp_path, prefix):
    head = "language_model.lm_head." if prefix == "language_model.model." else "lm_head."
    renamed = {
        re.sub("^model.", prefix, re.sub("^lm_head.", head, text_name(name))): each
        for name, each in weights_of(folders["mistral3"]).items()
    }
    folder = with_weights(folders["mistral3"], tmp_path / "old", renamed)
    trained(folder, tmp_path / "out")
    assert weights_of(tmp_path / "out").keys() == renamed.keys()


def test_export_needs_the_folder_of_the_whole_model(folders, tmp_path):
    folder, checkpoint = folders["qwen3_vl"], tmp_path / "checkpoint"
    import_checkpoint(folder, checkpoint, ParallelDims(tensor=2))
    with pytest.raises(ValueError, match=r"the other towers of the model cannot be copied.*--hf-"):
        export_checkpoint(checkpoint, tmp_path / "no")
    export_checkpoint(checkpoint, tmp_path / "out", hf_config=folder)
    assert_same(weights_of(tmp_path / "out"), weights_of(folder))
    with pytest.raises(ValueError, match="quantised weights are not supported for the multimodal"):
        export_checkpoint(checkpoint, tmp_path / "no", hf_config=folder, quantization="int8")


def test_read_shape_without_text_config_is_the_same(folders, tmp_path):
    def flatten(config):
        text = config.pop("text_config")
        config |= {key: each for key, each in text.items() if key not in ("model_type", "dtype")}
        config["rope_scaling"] = config.pop("rope_parameters") | {"rope_type": "mrope"}
        config["quantization_config"] = compressed("float-quantized", "float", "channel")

    flat = edited(folders["qwen2_5_vl"], tmp_path / "flat", flatten)
    assert read_shape(flat) == read_shape(folders["qwen2_5_vl"])


def test_read_shape_equals_the_text_familys(folders, tmp_path):
    shape = read_shape(folders["qwen3_vl"])
    plain = tiny_model(tmp_path, "qwen3", tied=True, num_hidden_layers=4, head_dim=32)
    assert shape == read_shape(plain)


def test_read_shape_stacks_experts_as_published(folders, tmp_path):
    shape = read_shape(folders["qwen3_vl_moe"])
    plain = read_shape(tiny_model(tmp_path, "qwen3_moe", num_hidden_layers=4, head_dim=32))
    assert (plain.moe.stacks, shape.moe.stacks) == (None, "transposed")
    assert differing_fields(shape, plain) == []


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("mistral3", "rms_norm_eps"),
        ("qwen3_vl_moe", "num_local_experts"),
        ("qwen3_vl_moe", "moe_intermediate_size"),
        ("qwen3_vl_moe", "norm_topk_prob"),
    ],
)
def test_read_shape_names_a_missing_key(folders, tmp_path, kind, key):
    folder = with_text(folders[kind], tmp_path / key, **{key: None})
    with pytest.raises(ValueError, match=f"text_config has no {key.replace('local_', '')}"):
        read_shape(folder)


def test_import_names_transposed_experts(folders, tmp_path):
    def transpose(weights):
        name = next(name for name in weights if name.endswith("experts.down_proj"))
        weights[name] = weights[name].transpose(1, 2).contiguous()

    folder = variant(folders["qwen3_vl_moe"], tmp_path / "m", transpose)
    with pytest.raises(ValueError, match=r"requires .* \(transposes of the published ones"):
        import_checkpoint(folder, tmp_path / "out", ParallelDims())


@pytest.mark.parametrize(("kind", "family"), [("mistral3", "ministral3"), ("kimi_k25", "kimi_k2")])
def test_read_shape_takes_all_families_of_a_tower(folders, tmp_path, kind, family):
    own = {"model_type": family} | OWN_FIELDS.get(family, {})
    folder = with_text(folders[kind], tmp_path / "m", **own)
    assert read_shape(folder) == replace(read_shape(folders[kind]), family=family)


def test_read_shape_assumes_the_familys_defaults(folders, tmp_path):
    def shorten(config):
        config.pop("tie_word_embeddings")
        for key in ("tie_word_embeddings", "rms_norm_eps", "query_pre_attn_scalar"):
            config["text_config"].pop(key)

    shape = read_shape(edited(folders["gemma3"], tmp_path / "m", shorten))
    assert shape == replace(read_shape(folders["gemma3"]), tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"model_type": "gemma"}, "text_config of a mistral3 has model_type 'gemma', supported: ["),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
        ({"mlp_bias": True}, "mlp_bias is True, only False is supported"),
        # As Kimi-K2.5 is published, with experts in INT4.
        (
            {"quantization_config": {"quant_method": "compressed-tensors"}},
            "weights are quantised by quantization_config inside of text_config",
        ),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be given, with one value inside"),
        # Next to rope_parameters
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "has no rope_theta, nor has its",
        ),
    ],
    ids=str,
)
def test_read_shape_refuses_an_unsupported_text_config(folders, tmp_path, edit, message):
    folder = edited(folders["mistral3"], tmp_path / "m", lambda c: c["text_config"].update(edit))
    with pytest.raises(ValueError, match=re.escape(message)):
        read_shape(folder)


# Kimi-K2.5's text tower has no tied head.
@pytest.mark.parametrize("model_type", [kind for kind in CONFIGS if kind != "kimi_k25"])
def test_read_shape_ties_a_head_as_transformers(folders, tmp_path, model_type):
    def tie_inside(config):
        config.pop("tie_word_embeddings", None)
        config["text_config"]["tie_word_embeddings"] = True

    folder = edited(folders[model_type], tmp_path / "m", tie_inside)
    if AutoConfig.from_pretrained(folder).tie_word_embeddings:
        assert read_shape(folder).tie_word_embeddings
    else:
        message = r"tie_word_embeddings must be given, .* it is \[True\]"
        with pytest.raises(ValueError, match=message):
            read_shape(folder)


def test_import_names_a_missing_tensor(folders, tmp_path):
    missing = {"language_model.model.norm.weight": None}
    folder = variant(folders["mistral3"], tmp_path / "m", missing)
    with pytest.raises(ValueError, match=r"model\.norm\.weight \[64\] is missing"):
        import_checkpoint(folder, tmp_path / "out", ParallelDims())
