"""Quantised folders read like their dequantised copies at any layout; bad folders are refused."""

import json
import os
import re

import pytest
import torch
from safetensors.torch import save_file

from checkpoint_convert import check_weights, read_shape
from checkpoint_convert.hf_config import read_scheme
from checkpoint_convert.hf_folder import locate_tensors
from checkpoint_convert.hf_to_megatron import import_checkpoint
from checkpoint_convert.quantized.numbers import DequantizedTensors
from checkpoint_convert.quantized.places import with_blocks, with_scales
from checkpoint_convert.quantized.scheme import Mxfp4Scheme, scheme_of
from checkpoint_convert.verify import verify_weights
from checkpoint_convert.weights import open_weights
from helpers.models.conversions import (
    assert_same,
    bytes_of,
    config_of,
    rank_parameters,
    read_tensor,
    round_trip,
    variant,
    weights_of,
)
from helpers.models.mxfp4 import mxfp4_copies
from helpers.models.quantized import (
    E4M3,
    FORMATS,
    compressed,
    dequantized_copy,
    nvfp4_copies,
    quantized_copy,
    spread,
)
from helpers.models.tiny import tiny_model
from parallel import Box, ParallelDims

CUTS = [
    ParallelDims(),
    ParallelDims(tensor=2),
    ParallelDims(tensor=4, pipeline=2),
    ParallelDims(tensor=2, expert=2, data=2, expert_tensor=1),
]
# Experts are whole, and each stack has all of them.
STACKED_CUTS = [
    CUTS[0],
    ParallelDims(tensor=2, expert_tensor=1),
    ParallelDims(pipeline=2, data=4, expert=4),
    ParallelDims(tensor=2, pipeline=2, context=2, expert=2, expert_tensor=1),
]
# At tp4 a rank has 12 of an expert's 48 columns, and begins and ends inside blocks.
PACKED_CUTS = [ParallelDims(tensor=4, pipeline=2), ParallelDims(data=2, expert=2)]
BY_BLOCKS = ("DeepSeek", "FP8 in blocks", "INT8 per channel")
CASES = {
    **{("qwen3", form): CUTS[2:3] for form in FORMATS},
    **{("qwen3_moe", form): CUTS for form in FORMATS},
    **{("deepseek_v3", form): CUTS for form in BY_BLOCKS},  # some last blocks are partial
    ("gpt_oss", "MXFP4"): STACKED_CUTS,
    ("qwen3_moe", "NVFP4"): PACKED_CUTS,
    ("qwen3_moe", "NVFP4 of ModelOpt"): PACKED_CUTS[:1],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(quantised, dequantised) folder by family and format."""
    found = {}
    for family in dict.fromkeys(family for family, _ in CASES):
        folder = tmp_path_factory.mktemp(family)
        model = tiny_model(folder / family, family)
        if family == "gpt_oss":
            found[family, "MXFP4"] = mxfp4_copies(model, folder)
            continue
        for name, form in FORMATS.items():
            quantized = quantized_copy(model, folder / name, form)
            found[family, name] = quantized, dequantized_copy(quantized, folder / f"_{name}", form)
        if family == "qwen3_moe":
            copies = nvfp4_copies(model, folder)
            found |= {(family, form): both for form, both in copies.items()}
    return found


@pytest.mark.parametrize(
    ("family", "form", "dims"), [(*case, dims) for case, all_ in CASES.items() for dims in all_]
)
def test_read_weights_equals_the_dequantised_copy(folders, family, form, dims):
    for rank in range(dims.world_size):
        for dtype in (torch.bfloat16, torch.float32):
            found, wanted = (rank_parameters(f, dims, rank, dtype) for f in folders[family, form])
            assert_same(found[1], wanted[1])


@pytest.mark.parametrize("size", [(3, 2), ()], ids=["blocks", "tensor"])
def test_spread_multiplies_blocks_as_transformers_does(size):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    values = torch.randn(384, 256).to(E4M3)
    scales = torch.rand(size) + 0.01
    expected = Fp8Dequantize(None)._dequantize_one(values, scales, torch.bfloat16)
    product = values.float() * spread(scales, (384, 256), (128, 128))
    assert torch.equal(product.bfloat16(), expected)


# One matrix, or stack of them.

CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128]}
ROWS, COLUMNS = 576, 1000  # as DeepSeek's kv_a_proj_with_mqa, its last blocks are partial


@pytest.fixture(scope="module")
def matrices(folders, tmp_path_factory):
    """By format: places in files, the name of a tensor, and its values."""
    path = tmp_path_factory.mktemp("matrix") / "model.safetensors"
    values, scales = torch.randn(ROWS, COLUMNS).to(E4M3), torch.rand(5, 8) + 0.01
    save_file({"x.weight": values, "x.weight_scale_inv": scales}, path)
    scheme = scheme_of(path, CONFIG, read_as="BF16")
    places, faults = with_scales(locate_tensors(path.parent), scheme)
    assert (list(places), faults) == (["x.weight"], [])
    product = (values.float() * spread(scales, (ROWS, COLUMNS), (128, 128))).bfloat16()
    found = {"blocks": (places, "x.weight", product)}
    quantized, plain = folders["gpt_oss", "MXFP4"]
    places, faults = with_blocks(locate_tensors(quantized), Mxfp4Scheme("BF16"))
    assert faults == []
    name = "model.layers.0.mlp.experts.down_proj"
    found["MXFP4"] = places, name, weights_of(plain)[name]
    name = "model.layers.0.self_attn.q_proj.weight"
    for form in ("NVFP4", "NVFP4 of ModelOpt"):
        quantized, plain = folders["qwen3_moe", form]
        places = check_weights(quantized, read_shape(quantized))
        found[form] = places, name, weights_of(plain)[name]
    return found


OVER_EDGES, ONE_ELEMENT = Box((127, 250), (130, 135)), Box((575, 999), (1, 1))
PACKED_BOXES = [Box((0, 0), (64, 64)), Box((3, 5), (7, 30)), Box((63, 63), (1, 1))]
BOXES = {
    "blocks": [
        Box((0, 0), (ROWS, COLUMNS)),
        Box((130, 140), (3, 5)),  # inside a block
        OVER_EDGES,
        Box((512, 896), (64, 104)),  # the last, partial block
        ONE_ELEMENT,
    ],
    "MXFP4": [
        Box.whole((4, 96, 64)),
        Box((1, 33, 7), (2, 5, 9)),  # inside a block
        Box((0, 31, 0), (1, 34, 64)),  # over the edges of blocks
        Box((3, 95, 63), (1, 1, 1)),
    ],
    "NVFP4": PACKED_BOXES,
    "NVFP4 of ModelOpt": PACKED_BOXES,
}


@pytest.mark.parametrize("most", [1 << 20, 700, 40])
@pytest.mark.parametrize("form", BOXES)
def test_dequantized_tensors_reads_any_box(matrices, form, most, monkeypatch):
    monkeypatch.setattr("checkpoint_convert.quantized.numbers._MAX_ELEMENTS", most)
    places, name, expected = matrices[form]
    for box in BOXES[form]:
        found = read_tensor(DequantizedTensors(places), name, box)
        assert torch.equal(bytes_of(found), bytes_of(expected[box.slices])), box


@pytest.mark.parametrize(("box", "num_blocks"), [(OVER_EDGES, 3 * 3), (ONE_ELEMENT, 1)])
def test_dequantized_tensors_reads_bytes_of_the_box(matrices, box, num_blocks, monkeypatch):
    counts, preadv = [], os.preadv

    def counted(descriptor, buffers, position):
        counts.append(preadv(descriptor, buffers, position))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counted)
    read_tensor(DequantizedTensors(matrices["blocks"][0]), "x.weight", box)
    assert sum(counts) == box.num_elements + 4 * num_blocks


def test_dequantized_tensors_has_no_whole_matrix_in_float32(matrices, monkeypatch):
    sizes, product = [], DequantizedTensors.read_into.__globals__["dequantized"]

    def recorded(values, *rest):
        sizes.append(values.numel())
        return product(values, *rest)

    monkeypatch.setattr("checkpoint_convert.quantized.numbers._MAX_ELEMENTS", 5000)
    monkeypatch.setattr("checkpoint_convert.quantized.numbers.dequantized", recorded)
    read_tensor(DequantizedTensors(matrices["blocks"][0]), "x.weight", BOXES["blocks"][0])
    assert max(sizes) <= 5000
    assert sum(sizes) == ROWS * COLUMNS


# Conversions.


@pytest.mark.parametrize(
    ("family", "form", "dims"),
    [
        ("deepseek_v3", "DeepSeek", ParallelDims(tensor=2)),
        ("qwen3_moe", "ModelOpt FP8", ParallelDims(tensor=2)),
        ("gpt_oss", "MXFP4", ParallelDims(pipeline=2)),
        ("qwen3_moe", "NVFP4", ParallelDims(tensor=2)),
    ],
)
def test_round_trip_is_the_dequantised_copy(folders, tmp_path, family, form, dims):
    quantized, plain = folders[family, form]
    out = round_trip(quantized, tmp_path, dims)
    checkpoint = tmp_path / "checkpoint"
    for other in (quantized, plain):
        assert verify_weights(other, checkpoint) == []
    assert_same(weights_of(out), weights_of(plain))
    for folder in (checkpoint / "hf_config", out):
        config = config_of(folder)
        assert "quantization_config" not in config and config["dtype"] == "bfloat16"
        assert not (folder / "hf_quant_config.json").exists()
        assert read_scheme(folder) is None


def test_scales_may_be_in_another_file_than_weights(folders, tmp_path):
    quantized, plain = folders["qwen3", "DeepSeek"]
    split = variant(quantized, tmp_path / "split")
    (split / "model.safetensors").unlink()
    files = {"weights.safetensors": {}, "scales.safetensors": {}}
    index = {}
    for name, value in weights_of(quantized).items():
        file = "scales.safetensors" if name.endswith("scale_inv") else "weights.safetensors"
        files[file][name], index[name] = value, file
    for file, tensors in files.items():
        save_file(tensors, split / file)
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert verify_weights(split, plain) == []
    found, wanted = (rank_parameters(f, ParallelDims(pipeline=2), 1)[1] for f in (split, plain))
    assert_same(found, wanted)


def test_zero_scale_of_a_block_makes_zeros(folders, tmp_path):
    quantized, plain = folders["qwen3_moe", "NVFP4"]
    scales, read = weights_of(quantized)[f"{KEY}_scale"], weights_of(plain)[KEY]
    scales.view(torch.uint8)[3, 1] = 0
    read[3, 16:32] = 0
    folder = variant(quantized, tmp_path / "zero", {f"{KEY}_scale": scales})
    tensors = DequantizedTensors(check_weights(folder, read_shape(folder)))
    assert torch.equal(read_tensor(tensors, KEY, Box.whole(tuple(read.shape))), read)
    assert verify_weights(folder, variant(plain, tmp_path / "read", {KEY: read})) == []
    [difference] = verify_weights(folder, plain)
    assert (difference.tensor, difference.num_different) == (KEY, 16)


# Bad input.

UP = "model.layers.0.mlp.up_proj.weight"
KEY = "model.layers.0.self_attn.k_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
EXPERTS = "model.layers.1.mlp.experts."
DOWN = f"{EXPERTS}down_proj_blocks"


def scale_of(value, shape=(32, 4)):
    return torch.full(shape, value).to(E4M3)


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
        ("NVFP4", f"{KEY}_global_scale", None, f"_packed in model.safetensors is U8, but {KEY}_gl"),
        ("NVFP4", f"{KEY}_global_scale", torch.ones(2), "has shape [2]; the scale of a whole ma"),
        ("NVFP4", f"{KEY}_scale", torch.ones(32, 4), "has dtype F32, supported: ['F8"),
        ("NVFP4", f"{KEY}_packed", torch.ones(32, 28).byte(), "rows of 56 numbers, which is no m"),
        ("NVFP4", KEY, torch.ones(32, 32).byte(), f"{KEY} in model.safetensors is U8: its numbers"),
        ("NVFP4", KEY, torch.ones(32, 64).bfloat16(), f"{KEY} in model.safetensors is stored twic"),
        ("MXFP4", f"{EXPERTS}down_proj_scales", None, f"down_proj_scales of {DOWN} in model.safet"),
        ("MXFP4", DOWN, torch.ones(4, 64, 3, 8).byte(), "U8 [4, 64, 3, 8]; it must be U8 "),
        ("MXFP4", QUERY, torch.ones(64, 64).byte(), f"{QUERY} has dtype U8, supported: ['BF16', "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_check_weights_refuses_bad_numbers_and_scales(
    folders, tmp_path, form, name, value, message
):
    family = {"NVFP4": "qwen3_moe", "MXFP4": "gpt_oss"}.get(form, "qwen3")
    folder = variant(folders[family, form][0], tmp_path / "bad", {name: value})
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        check_weights(folder, read_shape(folder))
    assert str(folder) in str(raised.value)
    assert [line for line in str(raised.value).splitlines()[1:] if name.split("_scale")[0] in line]


@pytest.mark.parametrize(
    ("form", "name", "value", "message"),
    [
        *(
            (
                "DeepSeek",
                f"{UP}_scale_inv",
                torch.full((4, 2), scale),
                f"a scale of {scale:g}; it m",
            )
            for scale in (0.0, -1.0, float("nan"), float("inf"))
        ),
        ("NVFP4", f"{KEY}_global_scale", torch.zeros(1), "has a scale of 0; it must be a finite"),
        ("NVFP4", f"{KEY}_global_scale", torch.tensor([torch.nan]), "a scale of nan; it must be a"),
        ("NVFP4", f"{KEY}_global_scale", torch.tensor([1e-40]), "make a scale that is not finite"),
        ("NVFP4", f"{KEY}_scale", scale_of(torch.nan), "a finite number from 0"),
        ("NVFP4", f"{KEY}_scale", scale_of(-1.0), "a finite number from 0"),
        (
            *("MXFP4", f"{EXPERTS}down_proj_scales"),
            *(torch.full((4, 64, 3), 255).byte(), "has a scale of NaN"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_import_refuses_scales_that_are_not_finite(folders, tmp_path, form, name, value, message):
    family = {"NVFP4": "qwen3_moe", "MXFP4": "gpt_oss"}.get(form, "qwen3")
    folder = variant(folders[family, form][0], tmp_path / "bad", {name: value})
    message = rf"bad/model\.safetensors: .*{name}.* {message}"
    with pytest.raises(ValueError, match=message):
        import_checkpoint(folder, tmp_path / "out", ParallelDims())


def test_read_into_checks_only_the_scales_of_its_blocks(folders, tmp_path):
    def edit(weights):
        weights[f"{UP}_scale_inv"][3, 1] = torch.nan

    folder = variant(folders["qwen3", "DeepSeek"][0], tmp_path / "bad", edit)
    weights = open_weights(folder, read_shape(folder))
    read_tensor(weights.tensors, UP, Box((0, 0), (72, 40)))
    with pytest.raises(ValueError, match="has a scale of nan"):
        read_tensor(weights.tensors, UP, Box((72, 40), (1, 1)))


REFUSED = [
    ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq', supported: 'fp8' and"),
    ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
    ({"quant_method": ["fp8"]}, "quant_method ['fp8']"),
    ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size is 128; it must be the"),
    ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size is [128, 0]"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ', supported"),
    (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
        "group_size 32, supported: 16",
    ),
    ({"quant_method": "modelopt", "quantization": 5}, "quantization is 5; it must be an object"),
    (compressed("nvfp4-pack-quantized", "float", "group", num_bits=4), "weights.strategy 'group'"),
    (compressed("pack-quantized", "int", "group", num_bits=4), "format 'pack-quantized'"),
    (compressed("int-quantized", "int", "channel", num_bits=4), "group_0.weights.num_bits 4"),
    (compressed("int-quantized", "int", "channel", symmetric=False), "weights.symmetric False"),
    (compressed("int-quantized", "int", "group", group_size=128), "weights.strategy 'group'"),
    (compressed("float-quantized", "int", "channel"), "weights.type 'int', supported: 'float'"),
    *(
        (compressed("float-quantized", "float", "channel") | own, message)
        for own, message in (
            ({"config_groups": {}}, "config_groups quantises weights in 0 ways"),
            ({"transform_config": {"a": 1}}, "transform_config {'a': 1}"),
            ({"sparsity_config": {"format": "2:4"}}, "sparsity_config.format '2:4'"),
        )
    ),
]


@pytest.mark.parametrize(
    ("file", "table"),
    [
        ("config.json", {"compression_config": {"quant_method": "mxfp4"}}),
        ("hf_quant_config.json", {"quant_method": "mxfp4"}),
    ],
)
def test_mxfp4_under_another_key_is_refused_like_mxfp4(folders, tmp_path, file, table):
    values = config_of(folders["qwen3", "DeepSeek"][1])
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / file).write_text(json.dumps((values if file == "config.json" else {}) | table))
    with pytest.raises(ValueError, match="weights are quantised with quant_"):
        read_shape(tmp_path)


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_read_shape_refuses_unsupported_quantisation(folders, tmp_path, config, message):
    values = config_of(folders["qwen3", "DeepSeek"][1])
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        read_shape(tmp_path)
    assert str(tmp_path / "config.json") in str(raised.value)
    assert "\n" not in str(raised.value)
