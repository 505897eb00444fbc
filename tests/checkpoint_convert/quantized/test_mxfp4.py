"""MXFP4 folders of gpt-oss read as transformers dequantises them, at any cut."""

import json
import re

import pytest
import torch

from checkpoint_convert import megatron_layout, read_shape
from checkpoint_convert.hf_folder import locate_tensors
from checkpoint_convert.hf_to_megatron import import_checkpoint
from checkpoint_convert.megatron_to_hf import export_checkpoint
from checkpoint_convert.quantized.numbers import DequantizedTensors
from checkpoint_convert.quantized.places import with_blocks
from checkpoint_convert.quantized.scheme import Mxfp4Scheme
from checkpoint_convert.weights import read_weights
from helpers.models.conversions import assert_same, read_tensor, weights_of
from helpers.models.mxfp4 import mxfp4_copies
from helpers.models.tiny import tiny_model
from parallel import Box, ParallelDims

CUTS = [
    ParallelDims(),
    ParallelDims(tensor=2, expert_tensor=1),
    ParallelDims(pipeline=2, data=4, expert=4),
    ParallelDims(tensor=2, pipeline=2, context=2, expert=2, expert_tensor=1),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "gpt_oss")


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
    quantized, plain = mxfp4_copies(model, tmp_path)
    for rank in range(dims.world_size):
        assert_same(parameters_of(quantized, dims, rank), parameters_of(plain, dims, rank))


def test_any_box_is_that_box_of_the_dequantised_stack(model, tmp_path, monkeypatch):
    quantized, plain = mxfp4_copies(model, tmp_path)
    places, faults = with_blocks(locate_tensors(quantized), Mxfp4Scheme("BF16"))
    assert faults == []
    whole = weights_of(plain)["model.layers.0.mlp.experts.down_proj"]  # [4, 96, 64]
    for most in (1 << 20, 40):
        monkeypatch.setattr("checkpoint_convert.quantized.numbers._MAX_ELEMENTS", most)
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
    quantized, plain = mxfp4_copies(model, tmp_path)
    import_checkpoint(quantized, tmp_path / "megatron", ParallelDims(pipeline=2), num_workers=2)
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf", num_workers=2)
    assert_same(weights_of(tmp_path / "hf"), weights_of(plain))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"


EXPERTS = "model.layers.1.mlp.experts."


def as_bytes(weights):
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[name] = weights[name].to(torch.uint8)


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
        (as_bytes, "model.layers.0.self_attn.q_proj.weight has dtype U8, supported: ['BF16', "),
    ],
)
def test_what_cannot_be_read_is_refused(model, tmp_path, edit, message):
    quantized, _ = mxfp4_copies(model, tmp_path, edit)
    with pytest.raises(ValueError, match=re.escape(message)):
        parameters_of(quantized, ParallelDims(), 0)
