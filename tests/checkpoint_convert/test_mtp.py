"""MTP layers: exports copy them from the source or write trained ones."""

import json
import re
from dataclasses import replace

import pytest
import torch

from checkpoint_convert import check_weights, read_shape
from checkpoint_convert.families.decoder import MTP_LAYER
from checkpoint_convert.hf_to_megatron import import_checkpoint
from checkpoint_convert.megatron import checkpoint_layout
from checkpoint_convert.megatron_to_hf import export_checkpoint
from checkpoint_convert.verify import verify_weights
from helpers.models.conversions import (
    assert_same,
    config_of,
    edit_config,
    read_checkpoint,
    round_trip,
    variant,
    weights_of,
    write_checkpoint,
)
from helpers.models.quantized import FORMATS, dequantized_copy, quantized_copy
from helpers.models.tiny import add_mtp_layer, stacked_experts, tiny_model
from helpers.models.towers import tiny_multimodal
from parallel import ParallelDims

LAYER, FUSED = "model.layers.3.", "eh_proj.weight"


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    """A model with an MTP layer."""
    return add_mtp_layer(tiny_model(tmp_path_factory.mktemp("model") / "glm4_moe", "glm4_moe"))


@pytest.fixture(scope="module")
def checkpoint(glm, tmp_path_factory):
    """An import of `glm`."""
    out = tmp_path_factory.mktemp("imported") / "checkpoint"
    import_checkpoint(glm, out, ParallelDims())
    return out


@pytest.mark.parametrize(
    "family", ["glm4_moe", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "qwen3_next"]
)
def test_export_has_the_layer_of_the_given_folder(tmp_path, family):
    folder = add_mtp_layer(tiny_model(tmp_path / "model", family))
    options = {"hf_config": folder, "max_shard_bytes": 100_000}
    out = round_trip(folder, tmp_path, ParallelDims(tensor=2), **options)
    assert_same(weights_of(out), weights_of(folder))
    assert read_shape(out).num_mtp_layers == 1


@pytest.mark.parametrize("case", ["of its own", "config", "int8"])
def test_export_without_a_layer_says_so(glm, checkpoint, tmp_path, case):
    only_config = tmp_path / "config"
    only_config.mkdir()
    (only_config / "config.json").write_bytes((glm / "config.json").read_bytes())
    index = {"weight_map": {LAYER + FUSED: "model-00001-of-00001.safetensors"}}
    (only_config / "model.safetensors.index.json").write_text(json.dumps(index))
    options = {
        "of its own": {},
        "config": {"hf_config": only_config},
        "int8": {"hf_config": glm, "quantization": "int8"},
    }
    export_checkpoint(checkpoint, tmp_path / "out", **options[case])
    found = {int(n.split(".")[2]) for n in weights_of(tmp_path / "out") if ".layers." in n}
    assert found == {*range(read_shape(glm).num_layers)}
    assert read_shape(tmp_path / "out").num_mtp_layers == 0


def test_export_converts_the_layer_and_counts_its_bytes(glm, checkpoint, tmp_path):
    reported, out = [], tmp_path / "out"
    options = {"dtype": "BF16", "progress": lambda *both: reported.append(both)}
    export_checkpoint(checkpoint, out, hf_config=glm, **options)
    found, source = weights_of(out), weights_of(glm)
    float32 = {name for name, each in found.items() if each.dtype == torch.float32}
    assert {name.partition("mlp.")[2] for name in float32} == {"gate.e_score_correction_bias"}
    assert LAYER + "mlp.gate.e_score_correction_bias" in float32
    assert_same(found, {name: each.to(found[name].dtype) for name, each in source.items()})
    total = sum(each.nbytes for each in found.values())
    assert {total} == {each for _, each in reported}
    assert reported == sorted(reported)
    assert reported[-1] == (total, total)


def test_export_converts_the_layer_with_other_towers(tmp_path):
    model = tiny_multimodal(tmp_path / "model", "qwen3_5")
    names = ("mtp.fc.weight", "mtp.layers.0.mlp.up.weight")
    layer = {name: torch.randn(64, 128) for name in names}
    text = config_of(model)["text_config"] | {"mtp_num_hidden_layers": 1}
    folder = variant(model, tmp_path / "with", layer, text_config=text)
    found = weights_of(round_trip(folder, tmp_path, hf_config=folder, dtype="BF16"))
    assert {found[name].dtype for name in layer} == {torch.bfloat16}
    assert found["model.visual.merger.norm.weight"].dtype == torch.float32
    assert_same(found, {n: each.to(found[n].dtype) for n, each in weights_of(folder).items()})


def test_check_weights_names_unreadable_mtp_tensors(glm, tmp_path):
    odd = {"a": torch.ones(2, dtype=torch.int64), "b": torch.tensor(1.0)}
    folder = variant(glm, tmp_path / "odd", {LAYER + name: each for name, each in odd.items()})
    message = r"layers.3.a \[2\] has dtype I64(.|\n)*layers.3.b \[\] has"
    with pytest.raises(ValueError, match=message):
        check_weights(folder, read_shape(folder))


def with_layer(checkpoint, out, folder, further=()):
    """Copy the checkpoint and add the MTP layer of `folder`, in the form of a trained one, and
    `further` tensors; returns the copy and the keys of the layer."""
    shape = replace(read_shape(folder), num_mtp_layers=1, trains_mtp=True)
    shapes = checkpoint_layout(shape, shape.vocab_size).shapes
    layer = {key: torch.randn(size) for key, size in shapes.items() if key.startswith(MTP_LAYER)}
    tensors = read_checkpoint(checkpoint) | layer | dict(further)
    return write_checkpoint(out, tensors), layer


@pytest.mark.parametrize("form", FORMATS)
def test_export_dequantises_the_layer(glm, tmp_path, form):
    folder = quantized_copy(glm, tmp_path / "quantized", FORMATS[form])
    found = weights_of(round_trip(folder, tmp_path, ParallelDims(pipeline=2), hf_config=folder))
    expected = weights_of(dequantized_copy(folder, tmp_path / "plain", FORMATS[form]))
    assert_same(found, {name: each.to(found[name].dtype) for name, each in expected.items()})
    # A trained layer replaces it and its scales.
    trained, layer = with_layer(tmp_path / "checkpoint", tmp_path / "trained", folder)
    export_checkpoint(trained, tmp_path / "again", hf_config=folder)
    found = weights_of(tmp_path / "again")
    assert found.keys() == weights_of(glm).keys()
    assert torch.equal(found[LAYER + FUSED], layer[MTP_LAYER + FUSED])


def test_export_names_a_missing_scale(glm, checkpoint, tmp_path):
    form = FORMATS["FP8 per channel"]
    folder = quantized_copy(glm, tmp_path / "quantized", form)
    bad = variant(folder, tmp_path / "bad", {LAYER + FUSED + form.suffix: None})
    message = rf"multi-token prediction in .*\n  {re.escape(LAYER + FUSED)}"
    with pytest.raises(ValueError, match=message):
        export_checkpoint(checkpoint, tmp_path / "out", hf_config=bad)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stacked", ["", "model.", "mtp."])
def test_export_stacks_trained_experts_as_the_source(tmp_path, stacked):
    model = add_mtp_layer(tiny_model(tmp_path / "model", "qwen3_5_moe_text"))
    joined = stacked_experts(model, tmp_path / "joined")
    source = {n: x for n, x in weights_of(joined).items() if n.startswith(stacked)}
    source |= {n: x for n, x in weights_of(model).items() if not n.startswith(stacked)}
    folder = variant(model, tmp_path / "source", lambda all_: (all_.clear(), all_.update(source)))
    import_checkpoint(folder, tmp_path / "checkpoint", ParallelDims())
    trained, layer = with_layer(tmp_path / "checkpoint", tmp_path / "trained", folder)
    export_checkpoint(trained, tmp_path / "out", hf_config=folder)
    assert verify_weights(trained, tmp_path / "out") == []
    found = weights_of(tmp_path / "out")
    names = [name for name in source if not name.startswith("mtp.")]
    assert_same({n: found[n] for n in names}, {n: source[n] for n in names})
    assert {n: x.shape for n, x in found.items()} == {n: x.shape for n, x in source.items()}
    assert torch.equal(found["mtp.fc.weight"], layer[MTP_LAYER + FUSED])


@pytest.mark.parametrize("case", ["another key", "not all keys", "two layers"])
def test_export_leaves_out_untrained_layers(glm, checkpoint, tmp_path, case):
    further = {"mtp.layers.0.mtp_model_layer.mlp.linear_fc2.weight": torch.ones(2, 3)}
    trained, layer = with_layer(checkpoint, tmp_path / "trained", glm, further)
    folder = variant(glm, tmp_path / "model")
    if case == "not all keys":
        tensors = read_checkpoint(trained, lambda key: key != MTP_LAYER + "enorm.weight")
        write_checkpoint(trained, tensors)
    if case == "two layers":
        edit_config(folder, num_nextn_predict_layers=2)
    export_checkpoint(trained, tmp_path / "out", hf_config=folder)
    found = weights_of(tmp_path / "out")
    if case == "another key":
        assert torch.equal(found[LAYER + FUSED], layer[MTP_LAYER + FUSED])
    else:
        assert_same(found, weights_of(glm))
