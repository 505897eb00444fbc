"""Quantised folders read as their dequantised copies, at any cut; what cannot be is refused."""

import json
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import save_file

from checkpoint_convert import check_weights, megatron_layout, read_shape
from checkpoint_convert.hf_config import read_scheme
from checkpoint_convert.hf_folder import locate_tensors
from checkpoint_convert.hf_to_megatron import import_checkpoint
from checkpoint_convert.megatron_to_hf import export_checkpoint
from checkpoint_convert.quantized.numbers import DequantizedTensors
from checkpoint_convert.quantized.places import with_scales
from checkpoint_convert.quantized.scheme import scheme_of
from checkpoint_convert.verify import verify_weights
from checkpoint_convert.weights import open_weights, read_weights
from helpers.models.conversions import assert_same, read_tensor, weights_of
from helpers.models.quantized import (
    E4M3,
    FORMATS,
    compressed,
    dequantized_copy,
    quantized_copy,
    spread,
)
from helpers.models.tiny import tiny_model
from parallel import Box, ParallelDims

FAMILIES = {"qwen3": "dense", "qwen3_moe": "experts", "deepseek_v3": "latents and experts"}
CUTS = [
    ParallelDims(),
    ParallelDims(tensor=2),
    ParallelDims(tensor=4, pipeline=2),
    ParallelDims(tensor=2, expert=2, data=2, expert_tensor=1),
]
DEEPSEEK = FORMATS["DeepSeek"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {family: tiny_model(folder / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    """(quantised, dequantised) folder by family and format."""
    found = {}
    for family, model in models.items():
        folder = tmp_path_factory.mktemp(family)
        for name, form in FORMATS.items():
            quantized = quantized_copy(model, folder / name, form)
            found[family, name] = quantized, dequantized_copy(quantized, folder / f"_{name}", form)
    return found


def parameters_of(folder, dims, rank, dtype):
    shape, at = read_shape(folder), dims.coordinates(rank)
    layout = megatron_layout(shape, dims, at, transformer_engine=False)
    parameters = {n: torch.full(s, torch.nan, dtype=dtype) for n, s in layout.shapes.items()}
    read_weights(folder, shape, layout, parameters)
    return parameters


@pytest.mark.parametrize("dims", CUTS, ids=str)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_read_what_they_would_of_the_dequantised_copy(folders, family, form, dims):
    if family == "qwen3":
        dims = ParallelDims(tensor=dims.tensor, pipeline=dims.pipeline)
    quantized, plain = folders[family, form]
    for rank in range(dims.world_size):
        for dtype in (torch.bfloat16, torch.float32):
            found, wanted = (parameters_of(f, dims, rank, dtype) for f in (quantized, plain))
            assert_same(found, wanted)


@pytest.mark.parametrize("size", [(3, 2), ()], ids=["blocks", "tensor"])
def test_whole_blocks_are_dequantised_as_by_transformers(size):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    values = torch.randn(384, 256).to(E4M3)
    scales = torch.rand(size) + 0.01
    expected = Fp8Dequantize(None)._dequantize_one(values, scales, torch.bfloat16)
    product = values.float() * spread(scales, (384, 256), (128, 128))
    assert torch.equal(product.bfloat16(), expected)


# One matrix in a file.

CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128]}
ROWS, COLUMNS = 576, 1000  # as DeepSeek's kv_a_proj_with_mqa, its last blocks are partial


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    path = tmp_path_factory.mktemp("matrix") / "model.safetensors"
    values, scales = torch.randn(ROWS, COLUMNS).to(E4M3), torch.rand(5, 8) + 0.01
    save_file({"x.weight": values, "x.weight_scale_inv": scales}, path)
    places, faults = with_scales(
        locate_tensors(path.parent), scheme_of(path, CONFIG, read_as="BF16")
    )
    assert (list(places), faults) == (["x.weight"], [])
    product = values.float() * spread(scales, (ROWS, COLUMNS), (128, 128))
    return places, product.bfloat16()


BOXES = {
    "whole": Box((0, 0), (ROWS, COLUMNS)),
    "inside a block": Box((130, 140), (3, 5)),
    "over the edges of blocks": Box((127, 250), (130, 135)),
    "the last, partial block": Box((512, 896), (64, 104)),
    "one element": Box((575, 999), (1, 1)),
}


@pytest.mark.parametrize("most", [1 << 20, 700], ids=["at once", "in parts"])
@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
def test_any_box_is_that_box_of_the_dequantised_matrix(matrix, box, most, monkeypatch):
    monkeypatch.setattr("checkpoint_convert.quantized.numbers._MAX_ELEMENTS", most)
    places, expected = matrix
    found = read_tensor(DequantizedTensors(places), "x.weight", box)
    assert torch.equal(found, expected[box.slices])


@pytest.mark.parametrize(
    ("box", "num_blocks"), [(BOXES["over the edges of blocks"], 3 * 3), (BOXES["one element"], 1)]
)
def test_a_box_reads_its_own_bytes_and_the_scales_of_its_blocks(
    matrix, box, num_blocks, monkeypatch
):
    counts, preadv = [], os.preadv

    def counted(descriptor, buffers, position):
        counts.append(preadv(descriptor, buffers, position))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counted)
    read_tensor(DequantizedTensors(matrix[0]), "x.weight", box)
    assert sum(counts) == box.num_elements + 4 * num_blocks


def test_a_matrix_is_never_whole_in_float32(matrix, monkeypatch):
    sizes, product = [], DequantizedTensors.read_into.__globals__["dequantized"]

    def recorded(values, *rest):
        sizes.append(values.numel())
        return product(values, *rest)

    monkeypatch.setattr("checkpoint_convert.quantized.numbers._MAX_ELEMENTS", 5000)
    monkeypatch.setattr("checkpoint_convert.quantized.numbers.dequantized", recorded)
    read_tensor(DequantizedTensors(matrix[0]), "x.weight", BOXES["whole"])
    assert max(sizes) <= 5000
    assert sum(sizes) == ROWS * COLUMNS


# Conversions.


@pytest.mark.parametrize(
    ("family", "form"), [("deepseek_v3", "DeepSeek"), ("qwen3_moe", "ModelOpt FP8")]
)
def test_an_import_and_its_export_are_the_dequantised_copy(folders, tmp_path, family, form):
    quantized, plain = folders[family, form]
    import_checkpoint(quantized, tmp_path / "in", ParallelDims(tensor=2), num_workers=2)
    for other in (quantized, plain):
        assert verify_weights(other, tmp_path / "in") == []
    export_checkpoint(tmp_path / "in", tmp_path / "out")
    assert_same(weights_of(tmp_path / "out"), weights_of(plain))
    for folder in (tmp_path / "in" / "hf_config", tmp_path / "out"):
        config = json.loads((folder / "config.json").read_text())
        assert "quantization_config" not in config
        assert config["dtype"] == "bfloat16"
        assert not (folder / "hf_quant_config.json").exists()
        assert read_scheme(folder) is None


def test_scales_may_be_in_another_file_than_their_weights(folders, tmp_path):
    quantized, plain = folders["qwen3", "DeepSeek"]
    shutil.copytree(quantized, tmp_path / "split", ignore=shutil.ignore_patterns("*.safetensors"))
    files = {"weights.safetensors": {}, "scales.safetensors": {}}
    index = {}
    for name, value in weights_of(quantized).items():
        file = "scales.safetensors" if name.endswith("scale_inv") else "weights.safetensors"
        files[file][name], index[name] = value, file
    for file, tensors in files.items():
        save_file(tensors, tmp_path / "split" / file)
    (tmp_path / "split" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": index})
    )
    assert verify_weights(tmp_path / "split", plain) == []
    dims = ParallelDims(pipeline=2)
    found, wanted = (parameters_of(f, dims, 1, torch.float32) for f in (tmp_path / "split", plain))
    assert_same(found, wanted)


# Bad input.

UP = "model.layers.0.mlp.up_proj.weight"


def edited(folders, tmp_path, form, edit):
    """A variant of the quantised dense model; `edit` changes its tensors in place."""
    shutil.copytree(folders["qwen3", form][0], tmp_path / "bad")
    weights = weights_of(tmp_path / "bad")
    edit(weights)
    save_file(weights, tmp_path / "bad" / "model.safetensors")
    return tmp_path / "bad"


@pytest.mark.parametrize(
    ("form", "name", "value", "message"),
    [
        ("DeepSeek", f"{UP}_scale_inv", None, f"{UP} in model.safetensors is F8_E4M3, but {UP}_sc"),
        ("DeepSeek", f"{UP}_scale_inv", torch.ones(4, 1), "[4, 1]; blocks of [24, 40] in a matrix"),
        ("DeepSeek", f"{UP}_scale_inv", torch.ones(4, 2).byte(), "has dtype U8, supported: ['F32'"),
        ("DeepSeek", UP, torch.ones(96, 64), f"{UP}_scale_inv [4, 2] is not part of the model"),
        ("DeepSeek", UP, torch.ones(96, 32).byte(), f"{UP} has shape [96, 32]"),
        ("FP8 per channel", f"{UP}_scale", torch.ones(64, 1), "has shape [64, 1]; blocks of [1, 6"),
        ("INT8 per channel", f"{UP}_zero_point", torch.ones(96, 1).char(), "only symmetric quant"),
        ("FP8 of Mistral", f"{UP}_scale_inv", torch.ones(4, 2), f"{UP}_scale_inv in model.safeten"),
        ("FP8 of Mistral", f"{UP}_scale", torch.ones(()), f"twice: {UP}_scale and {UP}_scale_inv"),
    ],
    ids=[
        *("missing", "shape", "dtype", "weight of 16 bit", "packed 4 bit", "channels"),
        *("zero point", "blocks without a key", "both names of scales"),
    ],
)
def test_a_folder_whose_scales_do_not_fit_is_refused_in_one_line(
    folders, tmp_path, form, name, value, message
):
    def edit(weights):
        if value is None:
            del weights[name]
        else:
            weights[name] = value

    folder = edited(folders, tmp_path, form, edit)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        check_weights(folder, read_shape(folder))
    named = [line for line in str(raised.value).splitlines()[1:] if UP in line]
    assert str(folder) in str(raised.value)
    assert named


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_number_above_0_is_refused_with_its_file(folders, tmp_path, scale):
    def edit(weights):
        weights[f"{UP}_scale_inv"][3, 1] = scale

    folder = edited(folders, tmp_path, "DeepSeek", edit)
    message = rf"bad/model\.safetensors: {UP}_scale_inv has a scale of {scale:g}; it must be"
    with pytest.raises(ValueError, match=message):
        import_checkpoint(folder, tmp_path / "out", ParallelDims())
    weights = open_weights(folder, read_shape(folder))
    read_tensor(weights.tensors, UP, Box((0, 0), (72, 40)))  # other blocks than the bad one


REFUSED = [
    ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq', supported: 'fp8' and"),
    ({"quant_method": "awq", "bits": 4}, "quant_method 'awq'"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes'"),
    ({"quant_method": "fbgemm_fp8"}, "quant_method 'fbgemm_fp8'"),
    ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
    ({"quant_method": ["fp8"]}, "quant_method ['fp8']"),
    ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size is 128; it must be the"),
    ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size is [128, 0]"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ', supported"),
    (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
        "group_size 32, supported: 16",
    ),
    (compressed("nvfp4-pack-quantized", "float", "group", num_bits=4), "weights.strategy 'group'"),
    ({"quant_method": "modelopt", "quantization": 5}, "quantization is 5; it must be an object"),
    (compressed("pack-quantized", "int", "group", num_bits=4), "format 'pack-quantized'"),
    (compressed("int-quantized", "int", "channel", num_bits=4), "group_0.weights.num_bits 4"),
    (compressed("int-quantized", "int", "channel", symmetric=False), "weights.symmetric False"),
    (compressed("int-quantized", "int", "group", group_size=128), "weights.strategy 'group'"),
    (compressed("float-quantized", "int", "channel"), "weights.type 'int', supported: 'float'"),
    (
        compressed("float-quantized", "float", "channel") | {"config_groups": {}},
        "config_groups quantises weights in 0 ways",
    ),
    (
        compressed("float-quantized", "float", "channel") | {"transform_config": {"a": 1}},
        "transform_config {'a': 1}",
    ),
    (
        compressed("float-quantized", "float", "tensor") | {"sparsity_config": {"format": "2:4"}},
        "sparsity_config.format '2:4'",
    ),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_another_way_to_quantise_is_refused_by_name(models, tmp_path, config, message):
    values = json.loads((models["qwen3"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        read_shape(tmp_path)
    assert str(tmp_path / "config.json") in str(raised.value)
    assert "\n" not in str(raised.value)
