"""Layouts of quantised workers; blocks that engines would cut are refused by name.

`tests/megatron_grpo/weights/test_quantized_pushes.py` compares them with vLLM's parameters.
"""

import re
from dataclasses import replace
from math import prod

import pytest

from checkpoint_convert import read_shape
from checkpoint_convert.quantized.model import (
    check_quantized_served,
    check_ranks,
    quantized_engine_dtypes,
    quantized_engine_layouts,
    quantized_model,
)
from checkpoint_convert.quantized.scheme import ENGINE_SCHEMES
from checkpoint_convert.vllm import EngineDims, engine_dtypes, engine_layouts
from helpers.models.shapes import DEEPSEEK_V3, LLAMA_70B, QWEN3_30B
from helpers.models.tiny import tiny_model
from parallel import Layout, ParallelDims, intersect

ONE_LAYER = replace(LLAMA_70B, num_layers=1)
# A dense layer and one of experts.
LATENT_LAYERS = replace(
    DEEPSEEK_V3, num_layers=2, moe=replace(DEEPSEEK_V3.moe, dense_layers=(0,), num_experts=16)
)


def layouts_of(scheme, dims, shape=ONE_LAYER):
    model = quantized_model(scheme, shape, "BF16")
    plain = engine_layouts(shape, dims)
    return model, plain, quantized_engine_layouts(plain, shape, dims, model)


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        (ONE_LAYER, EngineDims()),
        (ONE_LAYER, EngineDims(tensor=8)),
        (ONE_LAYER, EngineDims(tensor=16)),  # above the 8 key-value heads
        (LATENT_LAYERS, EngineDims(tensor=8)),
        (LATENT_LAYERS, EngineDims(tensor=4, data=2, expert_parallel=True)),
    ],
    ids=str,
)
@pytest.mark.parametrize("scheme", ENGINE_SCHEMES)
def test_layouts_have_the_scales_of_their_weights(scheme, shape, dims):
    model, plain, layouts = layouts_of(scheme, dims, shape)
    for before, layout in zip(plain, layouts, strict=True):
        layout.check_complete()
        assert layout.shapes.items() >= before.shapes.items()
        boxes = {piece.tensor: piece.box for piece in layout.pieces}
        for name in model.matrices.keys() & boxes.keys():
            block = model.scheme.block_in(model.matrices[name])
            scales = boxes[model.scale_name(name)]
            start = tuple(a * n for a, n in zip(scales.start, block, strict=True))
            covered = tuple(a * n for a, n in zip(scales.size, block, strict=True))
            assert all(a <= b for a, b in zip(start, boxes[name].start, strict=True))
            assert all(a >= b for a, b in zip(covered, boxes[name].size, strict=True))
    whole = Layout.of_whole_tensors(model.scales)
    copied = [copy for each in layouts for copy in intersect(whole, each)]
    assert {copy.source for copy in copied} == model.scales.keys()
    elements = sum(copy.destination_box.num_elements for copy in copied)
    assert elements >= sum(map(prod, model.scales.values()))


@pytest.mark.parametrize("scheme", ENGINE_SCHEMES)
def test_engine_dtypes_halve_the_bytes_of_a_push(scheme):
    model, (plain,), (layout,) = layouts_of(scheme, EngineDims())
    dtypes = engine_dtypes(ONE_LAYER, "bfloat16")
    found = quantized_engine_dtypes(dtypes, ONE_LAYER, model)
    sizes = {"bfloat16": 2, "float32": 4, "int8": 1, "float8_e4m3fn": 1}
    changed = [name for name in found if found[name] != dtypes.get(name)]
    before = sum(sizes[dtypes[n]] * prod(plain.shapes[n]) for n in changed if n in dtypes)
    after = sum(sizes[found[n]] * prod(layout.shapes[n]) for n in changed)
    assert after == pytest.approx(before / 2, rel=0.01)
    assert found.keys() == layout.shapes.keys()


def test_check_quantized_served_names_cut_blocks():
    small = replace(ONE_LAYER, intermediate_size=8192 + 128)
    with pytest.raises(ValueError, match=re.escape("gate_proj.weight [8320, 8192]")) as raised:
        check_quantized_served(small, EngineDims(tensor=2), quantized_model("fp8", small, "BF16"))
    assert "q_proj" not in str(raised.value)
    assert "(rollout.tensor_parallel_size 2) would cut blocks of [128, 128]" in str(raised.value)
    check_quantized_served(small, EngineDims(tensor=2), quantized_model("int8", small, "BF16"))


def test_check_quantized_served_counts_all_workers():
    model = quantized_model("fp8", QWEN3_30B, "BF16")
    with pytest.raises(ValueError, match=re.escape("experts.0.gate_proj.weight [768, 2048]")) as e:
        check_quantized_served(QWEN3_30B, EngineDims(tensor=4, data=2), model)
    assert "the 8 workers" in str(e.value)
    assert "use fewer workers, rollout.vllm.enable_expert_parallel: true" in str(e.value)
    dims = EngineDims(tensor=4, data=2, expert_parallel=True)
    check_quantized_served(QWEN3_30B, dims, model)
    with pytest.raises(
        ValueError, match=r"workers, rollout\.sglang\.ep_size: 8, or rollout\.engine"
    ):
        check_quantized_served(QWEN3_30B, EngineDims(tensor=8), model, "sglang")


def test_nvfp4_refuses_blocks_that_ranks_would_cut(tmp_path):
    shape = read_shape(tiny_model(tmp_path / "model", "qwen3_moe"))
    model = quantized_model("nvfp4", shape, "BF16")
    message = r"a rank has \[64, 12\] of model.layers.0.mlp.experts.0.down_proj.weight, which cuts"
    with pytest.raises(ValueError, match=message):
        check_ranks(shape, ParallelDims(tensor=4, pipeline=2), model)
    check_ranks(shape, ParallelDims(tensor=4, data=4, expert=4, expert_tensor=1), model)
    odd = read_shape(tiny_model(tmp_path / "odd", "qwen3", intermediate_size=72))
    message = r"columns of weights to be a multiple of 16: .*down_proj.weight \[64, 72\]"
    with pytest.raises(ValueError, match=message):
        quantized_model("nvfp4", odd, "BF16")


def test_fp8_names_weights_that_blocks_do_not_divide(tmp_path):
    model = tiny_model(tmp_path / "model", "qwen3_moe", moe_intermediate_size=192, hidden_size=128)
    with pytest.raises(ValueError, match=re.escape("q_proj.weight [64, 128], ")) as raised:
        quantized_model("fp8", read_shape(model), "BF16")
    message = r"experts\.0\.up_proj\.weight \[192, 128\].* and \d+ more: use"
    assert re.search(message, str(raised.value))
    assert "down_proj" not in str(raised.value)  # nothing is below it
    for scheme in ("fp8_channel", "int8"):
        assert quantized_model(scheme, read_shape(model), "BF16")
