"""Finding weights from headers: all faults of a folder are reported, no file outside is read."""

import json
import re
import shutil
import struct
import time
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_convert import check_weights, hf_tensors, read_shape
from checkpoint_convert.formats.safetensors_file import read_header
from checkpoint_convert.formats.tensor_io import StoredTensors
from checkpoint_convert.hf_export import create_export
from helpers.conversions import read_tensor
from helpers.models import tiny_model
from parallel import Box


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"), "qwen2", tied=True)


@pytest.fixture
def model(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "model")


@pytest.fixture
def sharded(pristine, tmp_path):
    create_export(tmp_path / "sharded", pristine, read_shape(pristine), torch.float32, 50_000)
    return tmp_path / "sharded"


@pytest.fixture
def bin_model(model):
    """The same model in one file of torch.save."""
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    return model


@pytest.fixture
def bin_sharded(bin_model):
    """The same model in two files of torch.save."""
    weights = list(torch.load(bin_model / "pytorch_model.bin").items())
    (bin_model / "pytorch_model.bin").unlink()
    weight_map = {}
    for i, some in enumerate([weights[:7], weights[7:]]):
        file = f"pytorch_model-{i + 1:05d}-of-00002.bin"
        torch.save(dict(some), bin_model / file)
        weight_map |= dict.fromkeys(dict(some), file)
    index = {"metadata": {}, "weight_map": weight_map}
    (bin_model / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return bin_model


def refusal(folder) -> str:
    start = time.perf_counter()
    with pytest.raises(ValueError) as error:
        check_weights(folder, read_shape(folder))
    assert time.perf_counter() - start < 1.0
    return str(error.value)


def edit_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def edit_index(folder, change):
    (path,) = folder.glob("*.index.json")
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def write_raw(folder, header: bytes, data: bytes = b""):
    raw = struct.pack("<Q", len(header)) + header + data
    (folder / "model.safetensors").write_bytes(raw)


def test_the_places_of_all_tensors_are_found_in_one_file_and_in_many(model, sharded):
    shape = read_shape(model)
    for folder in (model, sharded):
        places = check_weights(folder, shape)
        assert {name: place.shape for name, place in places.items()} == hf_tensors(shape)
    place = check_weights(model, shape)["model.layers.1.self_attn.k_proj.bias"]
    stored = torch.frombuffer(
        bytearray(place.file.read_bytes()[place.offset : place.offset + place.num_bytes]),
        dtype=torch.float32,
    )
    expected = load_file(place.file)["model.layers.1.self_attn.k_proj.bias"]
    assert torch.equal(stored, expected)


def test_missing_unexpected_misshapen_and_mistyped_tensors_are_all_listed(model):
    def change(weights):
        del weights["model.norm.weight"], weights["model.layers.1.self_attn.k_proj.bias"]
        weights["model.layers.0.mlp.up_proj.bias"] = torch.zeros(96)
        weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(95, 64)
        weights["model.layers.0.mlp.gate_proj.weight"] = torch.zeros(96, 64, dtype=torch.int8)

    edit_weights(model, change)
    message = refusal(model)
    assert "model.norm.weight [64] is missing" in message
    assert "model.layers.1.self_attn.k_proj.bias [32] is missing" in message
    assert "model.layers.0.mlp.up_proj.bias [96] is not part of the model" in message
    assert "up_proj.weight has shape [95, 64], config.json requires [96, 64]" in message
    assert "gate_proj.weight has dtype I8, supported: ['BF16', 'F16', 'F32', 'F64']" in message
    assert len(message.splitlines()) == 6


def test_a_tied_head_saved_as_well_is_accepted_only_when_it_equals_the_embedding(model):
    def save_head(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    edit_weights(model, save_head)
    assert "lm_head.weight" not in check_weights(model, read_shape(model))
    edit_weights(model, lambda weights: weights["lm_head.weight"][249, 63].add_(1.0))
    told = "lm_head.weight differs from the embedding that config.json ties it to: set tie_word_emb"
    assert told in refusal(model)
    edit_weights(model, lambda weights: weights.pop("model.embed_tokens.weight"))
    message = refusal(model)
    assert "model.embed_tokens.weight [250, 64] is missing" in message
    assert "lm_head.weight is stored without the embedding it is tied to: save it as" in message


def test_weights_that_an_adapter_would_change_are_refused(model):
    (model / "adapter_config.json").write_text("{}")
    assert f"{model} has a LoRA adapter, which would be left out: merge it" in refusal(model)


def test_rotary_buffers_of_old_checkpoints_are_passed_over(model):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(model, lambda weights: weights.update({name: torch.ones(8)}))
    assert name not in check_weights(model, read_shape(model))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_layers_that_predict_further_tokens_are_passed_over_where_a_family_has_them(
    model, tmp_path, family
):
    other, name = tiny_model(tmp_path / "other", family, num_mtp_layers=1), "eh_proj.weight"

    def add(folder, layer):
        tensor = {f"model.layers.{layer}.{name}": torch.ones(8)}
        edit_weights(folder, lambda weights: weights.update(tensor))

    add(other, 3)
    assert f"model.layers.3.{name}" not in check_weights(other, read_shape(other))
    add(other, 4)
    assert f"model.layers.4.{name} [8] is not part of the model" in refusal(other)
    add(model, 2)
    assert f"model.layers.2.{name} [8] is not part of the model" in refusal(model)


def test_files_of_torch_save_are_read_in_one_file_and_in_many(pristine, bin_sharded, tmp_path):
    expected = load_file(pristine / "model.safetensors")
    places = check_weights(bin_sharded, read_shape(bin_sharded))
    assert len({place.file for place in places.values()}) == 2
    with closing(StoredTensors(places)) as tensors:
        for name, value in expected.items():
            assert torch.equal(read_tensor(tensors, name, Box.whole(tuple(value.shape))), value)
    torch.save(expected, bin_sharded / "pytorch_model.bin")
    one = check_weights(bin_sharded, read_shape(bin_sharded))
    assert {place.file.name for place in one.values()} == {"pytorch_model.bin"}


def test_safetensors_go_before_files_of_torch_save(model):
    (model / "pytorch_model.bin").write_bytes(b"an older copy")
    places = check_weights(model, read_shape(model))
    assert {place.file.name for place in places.values()} == {"model.safetensors"}


def test_a_dtype_in_a_file_of_torch_save_is_refused_by_its_name(bin_model):
    weights = torch.load(bin_model / "pytorch_model.bin")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.float8_e4m3fn)
    torch.save(weights, bin_model / "pytorch_model.bin")
    assert "model.norm.weight has dtype float8_e4m3fn, supported: " in refusal(bin_model)


def test_a_file_of_torch_save_that_would_run_code_is_refused_and_does_not(bin_model):
    class Touch:
        def __reduce__(self):
            return open, (str(bin_model / "canary"), "w")

    weights = torch.load(bin_model / "pytorch_model.bin")
    torch.save(weights | {"model.norm.weight": Touch()}, bin_model / "pytorch_model.bin")
    assert "io.open, which is not allowed" in refusal(bin_model)
    assert not (bin_model / "canary").exists()


def test_an_index_of_files_of_torch_save_is_checked_alike(bin_sharded):
    original = (bin_sharded / "pytorch_model.bin.index.json").read_text()
    first, name = "pytorch_model-00001-of-00002.bin", "model.norm.weight"
    for file, message in {
        "../stolen.bin": "names files outside the folder: ['../stolen.bin']",
        "absent.bin": "names files that are not there: ['absent.bin']",
        first: f"names tensors that are not there: ['{name} in {first}']",
    }.items():
        edit_index(bin_sharded, lambda index, file=file: index["weight_map"].update({name: file}))
        assert message in refusal(bin_sharded)
        (bin_sharded / "pytorch_model.bin.index.json").write_text(original)


@pytest.mark.parametrize("file", ["../stolen.safetensors", "/etc/passwd", "..", "a/b.safetensors"])
def test_an_index_that_points_out_of_the_folder_is_refused(sharded, file):
    edit_index(sharded, lambda index: index["weight_map"].update({"model.norm.weight": file}))
    assert f"names files outside the folder: [{file!r}]" in refusal(sharded)


@pytest.mark.parametrize("file", ["", "a\0b", "x" * 256, "\u00e4" * 128])
def test_an_index_with_a_name_that_no_file_can_have_is_refused(sharded, file):
    edit_index(sharded, lambda index: index["weight_map"].update({"model.norm.weight": file}))
    assert f"has names that no file can have: [{file!r}]" in refusal(sharded)


def test_a_missing_shard_is_named(sharded):
    (sharded / "model-00002-of-00006.safetensors").unlink()
    assert "not there: ['model-00002-of-00006.safetensors']" in refusal(sharded)


def test_a_tensor_that_the_index_names_in_the_wrong_shard_is_named(sharded):
    first = "model-00001-of-00006.safetensors"
    edit_index(sharded, lambda index: index["weight_map"].update({"model.norm.weight": first}))
    assert f"model.norm.weight in {first}" in refusal(sharded)


@pytest.mark.parametrize("index", [{}, {"weight_map": ["x"]}, {"weight_map": {"x": 1}}])
def test_an_index_without_a_map_is_named(sharded, index):
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "has no weight_map" in refusal(sharded)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "absent does not exist: "),
        ("config.json", "config.json is a file: give its folder"),
        ("model.safetensors", "model.safetensors is a file: give its folder"),
    ],
)
def test_what_is_no_folder_is_named(model, name, message):
    with pytest.raises(ValueError, match=re.escape(f"{model}/{message}")):
        read_shape(model / name)
    with pytest.raises(ValueError, match=re.escape(f"{model}/{message}")):
        check_weights(model / name, read_shape(model))


def test_a_folder_without_weights_is_named(model):
    (model / "model.safetensors").unlink()
    message = refusal(model)
    assert "none of model.safetensors, model.safetensors.index.json," in message
    assert "pytorch_model.bin and pytorch_model.bin.index.json is there" in message


@pytest.mark.parametrize("keep", [0, 5, 100, 10_000, -1])
def test_a_truncated_file_is_named(model, keep):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert str(path) in refusal(model)


@pytest.mark.parametrize(
    "header",
    [
        b"\xff" * 40,
        b"[]",
        b"[" * 100_000,
        b'{"x": {}}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b'{"x": {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}}',
        b'{"x": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}',
        b'{"x": {"dtype": "F32", "shape": [true, 2], "data_offsets": [0, 8]}}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8]}}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [false, 8]}}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
        b'"y": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
    ],
)
def test_a_malformed_header_is_named(model, header):
    write_raw(model, header, bytes(8))
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        read_header(model / "model.safetensors")


def test_a_header_that_claims_more_than_the_format_allows_is_not_read(model):
    with (model / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 1 << 36))
        file.truncate(1 << 37)
    assert "not a safetensors file" in refusal(model)
