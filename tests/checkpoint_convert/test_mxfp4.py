"""MXFP4 folders of gpt-oss read as transformers dequantises them, at any cut."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from checkpoint_convert import megatron_layout, read_shape
from checkpoint_convert.formats.dequantized import DequantizedTensors
from checkpoint_convert.formats.hf_folder import locate_tensors
from checkpoint_convert.hf_to_megatron import import_checkpoint
from checkpoint_convert.megatron_to_hf import export_checkpoint
from checkpoint_convert.mxfp4 import Mxfp4Scheme, with_blocks
from checkpoint_convert.weights import read_weights
from helpers.conversions import assert_same, read_tensor, weights_of
from helpers.models import tiny_model
from parallel import Box, ParallelDims

CUTS = [
    ParallelDims(),
    ParallelDims(tensor=2, expert_tensor=1),
    ParallelDims(pipeline=2, data=4, expert=4),
    ParallelDims(tensor=2, pipeline=2, context=2, expert=2, expert_tensor=1),
]
STACKS = ("gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "gpt_oss")


def copies(model, folder, edit=lambda weights: None):
    """The model with random experts in MXFP4, and dequantised by transformers, in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: each.bfloat16() for name, each in weights_of(model).items()}
    plain = dict(weights)
    for name in [name for name in weights if name.endswith(STACKS)]:
        experts, inputs, outputs = weights.pop(name).shape
        sizes = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*sizes, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(100, 130, sizes, dtype=torch.uint8, generator=generator)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales)
    edit(weights)
    for name, tensors in {"quantized": weights, "plain": plain}.items():
        shutil.copytree(model, folder / name)
        save_file(tensors, folder / name / "model.safetensors")
    file = folder / "quantized" / "config.json"
    table = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    config = json.loads(file.read_text()) | {"quantization_config": table, "dtype": "bfloat16"}
    file.write_text(json.dumps(config))
    return folder / "quantized", folder / "plain"


def parameters_of(folder, dims, rank):
    shape, at = read_shape(folder), dims.coordinates(rank)
    layout = megatron_layout(shape, dims, at, transformer_engine=True)
    parameters = {
        n: torch.full(s, torch.nan, dtype=torch.bfloat16) for n, s in layout.shapes.items()
    }
    read_weights(folder, shape, layout, parameters)
    return parameters


@pytest.mark.parametrize("dims", CUTS, ids=str)
def test_ranks_read_what_they_would_of_the_copy_by_transformers(model, tmp_path, dims):
    quantized, plain = copies(model, tmp_path)
    for rank in range(dims.world_size):
        assert_same(parameters_of(quantized, dims, rank), parameters_of(plain, dims, rank))


def test_any_box_is_that_box_of_the_dequantised_stack(model, tmp_path, monkeypatch):
    quantized, plain = copies(model, tmp_path)
    places, faults = with_blocks(locate_tensors(quantized), Mxfp4Scheme("BF16"))
    assert faults == []
    whole = weights_of(plain)["model.layers.0.mlp.experts.down_proj"]  # [4, 96, 64]
    for most in (1 << 20, 40):
        monkeypatch.setattr("checkpoint_convert.formats.dequantized._MAX_ELEMENTS", most)
        for box in (
            Box.whole((4, 96, 64)),
            Box((1, 33, 7), (2, 5, 9)),  # inside a block
            Box((0, 31, 0), (1, 34, 64)),  # over the edges of blocks
            Box((3, 95, 63), (1, 1, 1)),
        ):
            found = read_tensor(
                DequantizedTensors(places), "model.layers.0.mlp.experts.down_proj", box
            )
            assert torch.equal(found, whole[box.slices])


def test_a_model_comes_back_in_bfloat16(model, tmp_path):
    quantized, plain = copies(model, tmp_path)
    import_checkpoint(quantized, tmp_path / "megatron", ParallelDims(pipeline=2), num_workers=2)
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf", num_workers=2)
    assert_same(weights_of(tmp_path / "hf"), weights_of(plain))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"


EXPERTS = "model.layers.1.mlp.experts."


def cut_blocks(weights):
    weights[EXPERTS + "down_proj_blocks"] = weights[EXPERTS + "down_proj_blocks"][..., :8].clone()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda weights: weights.pop(EXPERTS + "down_proj_scales"),
            f"{EXPERTS}down_proj_scales of {EXPERTS}down_proj_blocks in model.safetensors is missi",
        ),
        (cut_blocks, "down_proj_blocks in model.safetensors is U8 [4, 64, 3, 8]; it must be U8 "),
        (
            lambda weights: weights[EXPERTS + "gate_up_proj_scales"].fill_(255),
            f"model.safetensors: {EXPERTS}gate_up_proj_scales has a scale of NaN",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(model, tmp_path, edit, message):
    quantized, _ = copies(model, tmp_path, edit)
    with pytest.raises(ValueError, match=re.escape(message)):
        parameters_of(quantized, ParallelDims(), 0)
