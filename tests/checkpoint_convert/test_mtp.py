"""Layers for multi-token prediction, which are draft models: exports keep those of the source."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_convert import check_weights, read_shape
from checkpoint_convert.families.decoder import MTP_LAYER
from checkpoint_convert.hf_to_megatron import import_checkpoint
from checkpoint_convert.megatron import checkpoint_layout
from checkpoint_convert.megatron_to_hf import export_checkpoint
from checkpoint_convert.verify import verify_weights
from helpers.models.conversions import assert_same, read_checkpoint, weights_of, write_checkpoint
from helpers.models.quantized import FORMATS, dequantized_copy, quantized_copy
from helpers.models.tiny import add_mtp_layer, stacked_experts, tiny_model
from helpers.models.towers import tiny_multimodal
from parallel import ParallelDims


def num_mtp_layers(folder):
    return read_shape(folder).num_mtp_layers


@pytest.mark.parametrize(
    "family", ["glm4_moe", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "qwen3_next"]
)
def test_a_checkpoint_is_exported_with_those_of_the_folder_that_is_given(tmp_path, family):
    folder = add_mtp_layer(tiny_model(tmp_path / "model", family))
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    import_checkpoint(folder, checkpoint, ParallelDims(tensor=2))
    settings = {"max_shard_bytes": 100_000, "num_workers": 2}
    export_checkpoint(checkpoint, out, hf_config=folder, **settings)
    assert_same(weights_of(out), weights_of(folder))
    assert num_mtp_layers(out) == 1


def test_where_they_are_not_to_be_had_an_export_has_none_and_says_so(tmp_path):
    folder = add_mtp_layer(tiny_model(tmp_path / "model", "glm4_moe"))
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    import_checkpoint(folder, checkpoint, ParallelDims())
    only_config = tmp_path / "config"
    only_config.mkdir()
    (only_config / "config.json").write_bytes((folder / "config.json").read_bytes())
    index = {"weight_map": {"model.layers.3.eh_proj.weight": "model-00001-of-00001.safetensors"}}
    (only_config / "model.safetensors.index.json").write_text(json.dumps(index))
    cases = {
        "of its own": {},
        "config": {"hf_config": only_config},
        "int8": {"hf_config": folder, "quantization": "int8"},
    }
    for name, options in cases.items():
        export_checkpoint(checkpoint, out / name, **options)
        layers = range(read_shape(folder).num_layers)
        assert {int(n.split(".")[2]) for n in weights_of(out / name) if ".layers." in n} == {
            *layers
        }
        assert num_mtp_layers(out / name) == 0


def test_they_have_the_dtype_of_the_export_and_are_counted_in_its_progress(tmp_path):
    folder = add_mtp_layer(tiny_model(tmp_path / "model", "glm4_moe"))
    import_checkpoint(folder, tmp_path / "checkpoint", ParallelDims())
    told = []
    export_checkpoint(
        tmp_path / "checkpoint",
        tmp_path / "out",
        hf_config=folder,
        dtype="BF16",
        progress=lambda done, total: told.append((done, total)),
    )
    found, source = weights_of(tmp_path / "out"), weights_of(folder)
    float32 = {name for name, each in found.items() if each.dtype == torch.float32}
    assert {name.partition("mlp.")[2] for name in float32} == {"gate.e_score_correction_bias"}
    assert "model.layers.3.mlp.gate.e_score_correction_bias" in float32
    assert_same(found, {name: each.to(found[name].dtype) for name, each in source.items()})
    total = sum(each.nbytes for each in found.values())
    assert {total} == {each for _, each in told}
    assert told == sorted(told)
    assert told[-1] == (total, total)


def test_beside_other_towers_they_have_the_dtype_of_the_export(tmp_path):
    folder = tiny_multimodal(tmp_path / "model", "qwen3_5")
    config, weights = json.loads((folder / "config.json").read_text()), weights_of(folder)
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    layer = {name: torch.randn(64, 128) for name in ("mtp.fc.weight", "mtp.layers.0.mlp.up.weight")}
    save_file(weights | layer, folder / "model.safetensors")
    import_checkpoint(folder, tmp_path / "checkpoint", ParallelDims())
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "out", hf_config=folder, dtype="BF16")
    found = weights_of(tmp_path / "out")
    assert {found[name].dtype for name in layer} == {torch.bfloat16}
    assert found["model.visual.merger.norm.weight"].dtype == torch.float32
    assert_same(found, {n: each.to(found[n].dtype) for n, each in (weights | layer).items()})


def test_what_cannot_be_read_is_named_before_training(tmp_path):
    folder = add_mtp_layer(tiny_model(tmp_path / "model", "glm4_moe"))
    weights = load_file(folder / "model.safetensors")
    odd = {"a": torch.ones(2, dtype=torch.int64), "b": torch.tensor(1.0)}
    weights |= {f"model.layers.3.{name}": each for name, each in odd.items()}
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"layers.3.a \[2\] has dtype I64(.|\n)*layers.3.b \[\] has"
    ):
        check_weights(folder, read_shape(folder))


@pytest.mark.parametrize("form", FORMATS)
def test_those_that_are_quantised_are_exported_as_they_are_read(tmp_path, form):
    plain = add_mtp_layer(tiny_model(tmp_path / "model", "glm4_moe"))
    folder = quantized_copy(plain, tmp_path / "quantized", FORMATS[form])
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    import_checkpoint(folder, checkpoint, ParallelDims(pipeline=2))
    export_checkpoint(checkpoint, out, hf_config=folder)
    expected = weights_of(dequantized_copy(folder, tmp_path / "plain", FORMATS[form]))
    found = weights_of(out)
    assert_same(found, {name: each.to(found[name].dtype) for name, each in expected.items()})


def test_a_missing_scale_is_named(tmp_path):
    form = FORMATS["FP8 per channel"]
    plain = add_mtp_layer(tiny_model(tmp_path / "model", "glm4_moe"))
    folder = quantized_copy(plain, tmp_path / "quantized", form)
    import_checkpoint(folder, tmp_path / "checkpoint", ParallelDims())
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.3.eh_proj.weight"
    del weights[name + form.suffix]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"multi-token prediction in .*\n  {name}"):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "out", hf_config=folder)
    assert not (tmp_path / "out").exists()


def with_layer(checkpoint, folder, further=()):
    """A copy of the checkpoint with the layer of the model in `folder` as it is trained, and with
    `further` tensors. Returns it and the keys of the layer."""
    shape = replace(read_shape(folder), num_mtp_layers=1, trains_mtp=True)
    shapes = checkpoint_layout(shape, shape.vocab_size).shapes
    layer = {key: torch.randn(size) for key, size in shapes.items() if key.startswith(MTP_LAYER)}
    tensors = read_checkpoint(checkpoint) | layer | dict(further)
    return write_checkpoint(checkpoint.with_name("trained"), tensors), layer


@pytest.mark.parametrize("form", FORMATS)
def test_one_that_was_trained_takes_the_place_of_a_quantised_one_with_its_scales(tmp_path, form):
    plain = add_mtp_layer(tiny_model(tmp_path / "model", "glm4_moe"))
    folder = quantized_copy(plain, tmp_path / "quantized", FORMATS[form])
    import_checkpoint(folder, tmp_path / "checkpoint", ParallelDims())
    trained, layer = with_layer(tmp_path / "checkpoint", folder)
    export_checkpoint(trained, tmp_path / "out", hf_config=folder)
    found = weights_of(tmp_path / "out")
    assert found.keys() == weights_of(plain).keys()
    name = "eh_proj.weight"
    assert torch.equal(found[f"model.layers.3.{name}"], layer[MTP_LAYER + name])


@pytest.mark.parametrize("stacked", ["", "model.", "mtp."])
def test_experts_of_one_that_was_trained_are_stacked_as_in_the_source(tmp_path, stacked):
    apart = add_mtp_layer(tiny_model(tmp_path / "model", "qwen3_5_moe_text"))
    folder, apart = stacked_experts(apart, tmp_path / "stacked"), weights_of(apart)
    source = {n: x for n, x in weights_of(folder).items() if n.startswith(stacked)}
    source |= {n: x for n, x in apart.items() if not n.startswith(stacked)}
    save_file(source, folder / "model.safetensors")
    import_checkpoint(folder, tmp_path / "checkpoint", ParallelDims())
    trained, layer = with_layer(tmp_path / "checkpoint", folder)
    export_checkpoint(trained, tmp_path / "out", hf_config=folder)
    assert verify_weights(trained, tmp_path / "out") == []
    found = weights_of(tmp_path / "out")
    of_model = [name for name in source if not name.startswith("mtp.")]
    assert_same({n: found[n] for n in of_model}, {n: source[n] for n in of_model})
    assert {n: x.shape for n, x in found.items()} == {n: x.shape for n, x in source.items()}
    assert torch.equal(found["mtp.fc.weight"], layer[MTP_LAYER + "eh_proj.weight"])


@pytest.mark.parametrize("case", ["another key", "not all keys", "two layers"])
def test_layers_of_a_checkpoint_that_are_not_as_we_train_one_are_left_out(tmp_path, case):
    folder = add_mtp_layer(tiny_model(tmp_path / "model", "glm4_moe"))
    import_checkpoint(folder, tmp_path / "checkpoint", ParallelDims())
    of_another = {"mtp.layers.0.mtp_model_layer.mlp.linear_fc2.weight": torch.ones(2, 3)}
    trained, layer = with_layer(tmp_path / "checkpoint", folder, of_another)
    if case == "not all keys":
        tensors = read_checkpoint(trained, lambda key: key != MTP_LAYER + "enorm.weight")
        write_checkpoint(trained, tensors)
    if case == "two layers":
        config = json.loads((folder / "config.json").read_text())
        config["num_nextn_predict_layers"] = 2
        (folder / "config.json").write_text(json.dumps(config))
    export_checkpoint(trained, tmp_path / "out", hf_config=folder)
    found = weights_of(tmp_path / "out")
    if case == "another key":
        name = "eh_proj.weight"
        assert torch.equal(found[f"model.layers.3.{name}"], layer[MTP_LAYER + name])
    else:
        assert_same(found, weights_of(folder))
