"""Finding weights from headers: everything wrong with a folder is said, nothing leaves it."""

import json
import shutil
import struct
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_convert import check_weights, create_export, hf_tensors, read_shape
from models import tiny_model


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
    path = folder / "model.safetensors.index.json"
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
    assert "up_proj.weight has shape [95, 64], config.json asks for [96, 64]" in message
    assert "gate_proj.weight has dtype I8, supported: ['BF16', 'F16', 'F32', 'F64']" in message
    assert len(message.splitlines()) == 6


def test_a_tied_head_saved_as_well_is_accepted_only_when_it_equals_the_embedding(model):
    def save_head(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    edit_weights(model, save_head)
    assert "lm_head.weight" not in check_weights(model, read_shape(model))
    edit_weights(model, lambda weights: weights["lm_head.weight"][249, 63].add_(1.0))
    assert "lm_head.weight [250, 64] is not part of the model" in refusal(model)


def test_rotary_buffers_of_old_checkpoints_are_passed_over(model):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(model, lambda weights: weights.update({name: torch.ones(8)}))
    assert name not in check_weights(model, read_shape(model))


@pytest.mark.parametrize("file", ["../stolen.safetensors", "/etc/passwd", "..", "a/b.safetensors"])
def test_an_index_that_points_out_of_the_folder_is_refused(sharded, file):
    edit_index(sharded, lambda index: index["weight_map"].update({"model.norm.weight": file}))
    message = refusal(sharded)
    assert "outside the folder" in message
    assert file in message


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


def test_a_folder_without_safetensors_is_named(model):
    (model / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(model)


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
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
        b'"y": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
    ],
)
def test_a_malformed_header_is_named(model, header):
    write_raw(model, header, bytes(8))
    assert str(model / "model.safetensors") in refusal(model)


def test_a_header_that_claims_more_than_the_format_allows_is_not_read(model):
    with (model / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 1 << 36))
        file.truncate(1 << 37)
    assert "not a safetensors file" in refusal(model)
