"""NVFP4 against compressed-tensors: numbers, scales, and what folders in it are read as."""

import json
import os
import re
import resource
import shutil

import pytest
import torch
from safetensors.torch import save_file

from checkpoint_convert import check_weights, megatron_layout, read_shape
from checkpoint_convert.hf_to_megatron import import_checkpoint
from checkpoint_convert.megatron_to_hf import export_checkpoint
from checkpoint_convert.quantized.model import check_ranks, quantized_model
from checkpoint_convert.quantized.numbers import (
    DequantizedTensors,
    block_maxima,
    packed,
    quantized,
    relative_scales,
    unpacked,
    whole_scale,
)
from checkpoint_convert.verify import verify_weights
from checkpoint_convert.weights import read_weights
from helpers.models.conversions import assert_same, bytes_of, read_tensor, weights_of
from helpers.models.quantized import E4M3, from_nvfp4, is_quantized, nvfp4, nvfp4_weights
from helpers.models.tiny import tiny_model
from parallel import Box, ParallelDims

BLOCK = (1, 16)
PARTS = ("weight_packed", "weight_scale", "weight_global_scale")


def normal(rows, columns):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def hard_values():
    """Values of many sizes, zeros of both signs, ties, and a block far below the others."""
    values = normal(96, 64) * torch.logspace(-6, 2, 96)[:, None]
    values[3], values[4, :16], values[5, ::2] = 0, -0.0, -0.0
    values[6, 0], values[6, 1:9] = 6, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25])
    return values.bfloat16()


@pytest.mark.parametrize(
    "values",
    [hard_values(), torch.zeros(2, 32), torch.full((2, 32), 1e-37), normal(8, 32).half()],
    ids=["hard", "zeros", "tiny", "half"],
)
def test_numbers_and_both_scales_are_those_of_compressed_tensors(values):
    [expected] = nvfp4([values])
    maxima = block_maxima(values, BLOCK)
    whole = whole_scale(maxima.amax())
    scales = relative_scales(maxima, whole)
    numbers = packed(quantized(values, scales.float() / whole, torch.uint8, BLOCK))
    found = {"weight_packed": numbers, "weight_scale": scales, "weight_global_scale": whole}
    assert_same(found, expected)
    assert torch.equal(packed(unpacked(numbers)), numbers)


def test_weights_of_a_normal_distribution_change_by_a_tenth():
    values = normal(1024, 1024).bfloat16()
    [stored] = nvfp4([values])
    error = (from_nvfp4(stored).float() - values.float()).norm() / values.float().norm()
    assert error == pytest.approx(0.095, abs=0.001)


# Folders.


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The model, a folder in NVFP4, the same by ModelOpt's names, and as it is dequantised."""
    folder = tmp_path_factory.mktemp("nvfp4")
    model = tiny_model(folder / "model", "qwen3_moe")
    plain = {name: value.bfloat16() for name, value in weights_of(model).items()}
    stored, read, renamed = nvfp4_weights(plain), {**plain}, {}
    for name, value in plain.items():
        if not is_quantized(name, value):
            renamed[name] = value
            continue
        tensors = {own: stored[name.removesuffix("weight") + own] for own in PARTS}
        read[name] = from_nvfp4(tensors)
        inverse = 1 / tensors["weight_global_scale"][0]
        renamed[name], renamed[f"{name}_scale"] = tensors["weight_packed"], tensors["weight_scale"]
        renamed[f"{name}_scale_2"] = inverse
        renamed[name.replace("weight", "input_scale")] = torch.tensor(0.1)
    how = quantized_model("nvfp4", read_shape(model), "BF16")
    modelopt = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    return {
        "model": saved(model, folder / "plain", plain),
        "nvfp4": saved(model, folder / "stored", stored, how.config),
        "modelopt": saved(model, folder / "modelopt", renamed, modelopt),
        "read": saved(model, folder / "read", read),
    }


def saved(model, folder, weights, config=None):
    shutil.copytree(model, folder)
    save_file(weights, folder / "model.safetensors")
    values = json.loads((model / "config.json").read_text()) | {"dtype": "bfloat16"}
    if config:
        values["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(values))
    return folder


# With a tensor size of 4, a rank has 12 of an expert's 48 columns: it begins and ends in blocks.
@pytest.mark.parametrize(
    "dims", [ParallelDims(tensor=4, pipeline=2), ParallelDims(data=2, expert=2)], ids=str
)
def test_ranks_read_what_compressed_tensors_decompresses(folders, dims):
    shape = read_shape(folders["nvfp4"])
    for rank in range(dims.world_size):
        layout = megatron_layout(shape, dims, dims.coordinates(rank), transformer_engine=False)
        both = []
        for folder in (folders["nvfp4"], folders["read"]):
            values = {n: torch.full(s, torch.nan) for n, s in layout.shapes.items()}
            read_weights(folder, shape, layout, values)
            both.append(values)
        assert_same(*both)


@pytest.mark.parametrize("form", ["nvfp4", "modelopt"])
def test_any_box_is_that_of_the_whole_matrix(folders, form, monkeypatch):
    name = "model.layers.0.self_attn.q_proj.weight"
    folder = folders[form]
    tensors = DequantizedTensors(check_weights(folder, read_shape(folder)))
    stored = weights_of(folder)
    if form == "nvfp4":
        expected = weights_of(folders["read"])[name]
    else:  # W = number * (scale * scale_2), of NVIDIA's model optimizer
        scales = stored[f"{name}_scale"].float() * stored[f"{name}_scale_2"]
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        codes = unpacked(stored[name]).int()
        numbers = torch.where(codes >= 8, -table[codes % 8], table[codes % 8])
        expected = (numbers * scales.repeat_interleave(16, 1)).bfloat16()
    for box in (Box((0, 0), (64, 64)), Box((3, 5), (7, 30)), Box((63, 63), (1, 1))):
        monkeypatch.setattr("checkpoint_convert.quantized.numbers._MAX_ELEMENTS", 50)
        found = read_tensor(tensors, name, box)
        assert torch.equal(bytes_of(found), bytes_of(expected[box.slices]))


@pytest.mark.parametrize("tensor", [1, 4])
def test_an_export_is_the_same_whatever_the_checkpoint_was_cut_for(folders, tmp_path, tensor):
    import_checkpoint(folders["model"], tmp_path / "in", ParallelDims(tensor=tensor))
    export_checkpoint(tmp_path / "in", tmp_path / "out", quantization="nvfp4", num_workers=2)
    assert_same(weights_of(tmp_path / "out"), weights_of(folders["nvfp4"]))
    assert verify_weights(tmp_path / "out", folders["read"]) == []
    assert verify_weights(folders["model"], tmp_path / "out", tolerance=0.1) == []
    import_checkpoint(tmp_path / "out", tmp_path / "again", ParallelDims(tensor=2))
    export_checkpoint(tmp_path / "again", tmp_path / "read")
    assert_same(weights_of(tmp_path / "read"), weights_of(folders["read"]))


@pytest.fixture
def few_descriptors():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 30, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_an_export_of_many_parts_needs_few_open_files(
    folders, tmp_path, monkeypatch, few_descriptors
):
    monkeypatch.setattr("checkpoint_convert.transfer.PART_BYTES", 1 << 10)
    progress = []
    import_checkpoint(folders["model"], tmp_path / "in", ParallelDims())
    export_checkpoint(
        *(tmp_path / "in", tmp_path / "out"),
        quantization="nvfp4",
        progress=lambda *both: progress.append(both),
    )
    assert_same(weights_of(tmp_path / "out"), weights_of(folders["nvfp4"]))
    [total] = {total for _, total in progress}
    done = [done for done, _ in progress]
    assert done == sorted(done) and done[-1] == total


def changed(folder, out, values):
    """A copy with some of its tensors replaced, or without them."""
    shutil.copytree(folder, out)
    weights = {n: each for n, each in (weights_of(out) | values).items() if each is not None}
    save_file(weights, out / "model.safetensors")
    return out


KEY = "model.layers.0.self_attn.k_proj.weight"


def test_a_block_whose_scale_is_zero_is_read_as_zeros(folders, tmp_path):
    scales = weights_of(folders["nvfp4"])[f"{KEY}_scale"]
    scales.view(torch.uint8)[3, 1] = 0
    read = weights_of(folders["read"])[KEY]
    read[3, 16:32] = 0
    folder = changed(folders["nvfp4"], tmp_path / "zero", {f"{KEY}_scale": scales})
    tensors = DequantizedTensors(check_weights(folder, read_shape(folder)))
    found = read_tensor(tensors, KEY, Box((0, 0), tuple(read.shape)))
    assert torch.equal(found, read)
    assert verify_weights(folder, changed(folders["read"], tmp_path / "read", {KEY: read})) == []
    [difference] = verify_weights(folder, folders["read"])
    assert (difference.tensor, difference.num_different) == (KEY, 16)


def test_verify_tells_numbers_that_are_all_the_largest(folders, tmp_path):
    stored = weights_of(folders["nvfp4"])
    numbers, scale = stored[f"{KEY}_packed"] | 0x77, stored[f"{KEY}_global_scale"] * 1e8
    values = {f"{KEY}_packed": numbers, f"{KEY}_global_scale": scale}
    folder = changed(folders["nvfp4"], tmp_path / "bad", values)
    [difference] = verify_weights(folder, folders["model"])
    assert difference.tensor == KEY


# Bad input.


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("_global_scale", None, f"{KEY}_packed in model.safetensors is U8, but {KEY}_global_scale"),
        ("_global_scale", torch.ones(2), "has shape [2]; that of a whole matrix has [1]"),
        ("_scale", torch.ones(32, 4), "_scale in model.safetensors has dtype F32, supported: ['F8"),
        ("_packed", torch.ones(32, 28).byte(), "has rows of 56 numbers, of which blocks have 16"),
        ("", torch.ones(32, 32).byte(), f"{KEY} in model.safetensors is U8: its numbers must be"),
        ("_global_scale", torch.zeros(1), "_global_scale has a scale of 0; it must be a finite"),
        ("_global_scale", torch.tensor([torch.nan]), "has a scale of nan; it must be a finite"),
        ("_global_scale", torch.tensor([1e-40]), "_global_scale make a scale that is not finite"),
        ("_scale", torch.full((32, 4), torch.nan).to(E4M3), "a finite number from 0"),
        ("_scale", torch.full((32, 4), -1.0).to(E4M3), "a finite number from 0"),
        ("", torch.ones(32, 64).bfloat16(), f"{KEY} in model.safetensors is stored twice: also as"),
    ],
    ids=[
        *("missing", "two", "dtype", "columns", "unpacked", "zero", "nan"),
        *("tiny", "block of nan", "block below zero", "twice"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(folders, tmp_path, name, value, message):
    folder = changed(folders["nvfp4"], tmp_path / "bad", {KEY + name: value})
    with pytest.raises(ValueError, match=re.escape(message)):
        import_checkpoint(folder, tmp_path / "out", ParallelDims())


def test_what_cannot_be_written_is_refused_by_name(tmp_path, folders):
    shape = read_shape(folders["model"])
    model = quantized_model("nvfp4", shape, "BF16")
    message = r"a rank has \[64, 12\] of model.layers.0.mlp.experts.0.down_proj.weight, which cuts"
    with pytest.raises(ValueError, match=message):
        check_ranks(shape, ParallelDims(tensor=4, pipeline=2), model)
    check_ranks(shape, ParallelDims(tensor=4, data=4, expert=4, expert_tensor=1), model)
    odd = read_shape(tiny_model(tmp_path / "odd", "qwen3", intermediate_size=72))
    with pytest.raises(
        ValueError, match=r"blocks of 16 columns.*divide: .*down_proj.weight \[64, 72\]"
    ):
        quantized_model("nvfp4", odd, "BF16")
