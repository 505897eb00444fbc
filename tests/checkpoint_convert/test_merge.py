"""PEFT adapters merged into the weights of their base."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from checkpoint_convert import hf_tensors, read_shape
from checkpoint_convert.merge import merge_adapter
from checkpoint_convert.peft import read_adapter
from checkpoint_convert.verify import verify_weights
from helpers.models.tiny import add_mtp_layer, tiny_model

RS5 = {"r": 5, "lora_alpha": 7, "use_rslora": True}
MODULES = ["q_proj", "k_proj", "o_proj", "down_proj"]


def adapter_of(base: Path, folder: Path, **config: Any) -> Any:
    """Save a random adapter by PEFT; returns PEFT's model."""
    torch.manual_seed(1)
    settings = RS5 | {"target_modules": MODULES, "init_lora_weights": False} | config
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**settings))
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "base", "llama")


@pytest.fixture
def adapter(base, tmp_path):
    adapter_of(base, tmp_path / "adapter")
    return tmp_path / "adapter"


def test_merge_adapter_equals_peft(base, tmp_path):
    model = adapter_of(base, tmp_path / "adapter")
    merge_adapter(
        base, tmp_path / "adapter", tmp_path / "ours", max_shard_bytes=100_000, num_workers=2
    )
    model.merge_and_unload().save_pretrained(tmp_path / "peft")
    assert verify_weights(tmp_path / "ours", tmp_path / "peft", tolerance=1e-6) == []
    changed = {each.tensor for each in verify_weights(tmp_path / "ours", base)}
    assert changed == {
        name
        for name in hf_tensors(read_shape(base))
        if name.removesuffix(".weight").rpartition(".")[2] in MODULES
    }


def test_merge_adapter_rounds_once_from_float64(base, adapter, tmp_path):
    merge_adapter(base, adapter, tmp_path / "ours", dtype="BF16")
    weights = load_file(base / "model.safetensors")
    values = load_file(adapter / "adapter_model.safetensors")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    scale = 7 / 5**0.5
    for name, weight in weights.items():
        prefix = "base_model.model." + name.removesuffix(".weight")
        if prefix + ".lora_A.weight" not in values:
            continue
        a, b = (values[f"{prefix}.lora_{x}.weight"].double() for x in "AB")
        exact = weight.double() + scale * (b @ a)
        step = exact.abs().clamp(min=1e-3) * 2**-8  # half the distance between two bfloat16 numbers
        assert ((ours[name].double() - exact).abs() <= step * 1.001).all()


# Refusals.

WEIGHTS = "adapter_model.safetensors"


def edit_weights(folder, edit):
    """`edit` changes the tensors of an adapter in place."""
    values = load_file(folder / WEIGHTS)
    edit(values)
    save_file(values, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is {'q_proj': 2}"),
        ({"bias": "all"}, "bias is all, and only none is supported"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"r": 4}, "lora_A.weight has shape [5, "),
        ({"target_modules": [*MODULES, "v_proj"]}, "layers.0.self_attn.v_proj has no adapter (nor"),
        ({"target_modules": r".*\.(q|k|o|down|up)_proj"}, "layers.0.mlp.up_proj has no adapter"),
        ({"target_modules": "all-linear"}, "layers.0.self_attn.v_proj has no adapter"),
        ({"target_modules": MODULES[1:]}, "q_proj has an adapter, and target_modules in"),
        ({"exclude_modules": ["q_proj"]}, "layers.0.self_attn.q_proj has an adapter"),
        ({"exclude_modules": r".*\.q_proj"}, "layers.0.self_attn.q_proj has an adapter"),
        ({"layers_to_transform": [0]}, "model.layers.1.mlp.down_proj has an adapter"),
        ({"layers_to_transform": [0, 1, 2]}, "names layer 2, and the model has 2 layers"),
        ({"target_modules": None}, "target_modules is None, and must name"),
        ({"target_modules": "("}, "target_modules is '(', no regular expression"),
        ({"target_modules": r".*\.(q|k|o|down)_proj"}, None),
        ({"target_modules": [*MODULES, "of_other_models"]}, None),
        ({"layers_to_transform": [0, 1]}, None),
    ],
)
def test_read_adapter_has_the_modules_of_its_config(base, adapter, config, message):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    shapes = hf_tensors(read_shape(base))
    if message is None:
        read_adapter(adapter, shapes)
        return
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_adapter(adapter, shapes)
    assert str(adapter) in str(caught.value)


def drop_first(values):
    values.pop(next(iter(values)))


def add_of_another_model(values):
    name = next(iter(values))
    values[name.replace("layers.0.", "layers.77.")] = values[name].clone()


def drop_a_layer(values):
    for name in [name for name in values if ".layers.1." in name]:
        values.pop(name)


def make_nan(values):
    values[[*values][-1]][-1, -1] = torch.nan


def make_infinite(values):
    values[[*values][-1]][-1, -1] = -torch.inf


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop_first, "is missing"),
        (add_of_another_model, r"of another model: the base has no model\.layers\.77\."),
        (drop_a_layer, r"model\.layers\.1\..* has no adapter \(nor have 3 more\)"),
        (make_nan, r"layers\.1\..*lora_.* has values that are not finite"),
        (make_infinite, r"layers\.1\..*lora_.* has values that are not finite"),
    ],
)
def test_merge_adapter_refuses_missing_layers_and_values_that_are_not_finite(
    base, adapter, tmp_path, edit, message
):
    edit_weights(adapter, edit)
    with pytest.raises(ValueError, match=message):
        merge_adapter(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_read_adapter_refuses_a_model(base):
    with pytest.raises(ValueError, match=r"has no adapter_config\.json"):
        read_adapter(base, hf_tensors(read_shape(base)))


def test_merge_adapter_refuses_stacked_experts(tmp_path):
    base, adapter = tiny_model(tmp_path / "base", "gpt_oss"), tmp_path / "adapter"
    adapter_of(base, adapter, target_modules=["o_proj"])

    def rename(values):
        for name in [*values]:
            values[name.replace("self_attn.o_proj", "mlp.experts.0.gate_proj")] = values.pop(name)

    edit_weights(adapter, rename)
    with pytest.raises(ValueError, match=r"has no model\.layers\.0\.mlp\.experts\.0\.gate_proj"):
        merge_adapter(base, adapter, tmp_path / "out")


def test_merge_adapter_keeps_mtp_layers(tmp_path):
    folder = add_mtp_layer(tiny_model(tmp_path / "model", "glm4_moe"))
    adapter_of(folder, tmp_path / "adapter", target_modules=["q_proj", "o_proj"])
    merge_adapter(folder, tmp_path / "adapter", tmp_path / "out")
    theirs, ours = (load_file(at / "model.safetensors") for at in (folder, tmp_path / "out"))
    layer = {name for name in theirs if ".layers.3." in name}
    assert len(layer) > 6
    assert all(torch.equal(theirs[name], ours[name]) for name in layer)
