"""Finding weights by headers: all faults of a folder are reported, no file outside is read."""

import json
import re
import shutil
import struct
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_convert import check_weights, hf_tensors, read_shape
from checkpoint_convert.formats.safetensors_file import read_header
from checkpoint_convert.formats.tensor_io import StoredTensors
from helpers.models.conversions import assert_same, read_tensor
from helpers.models.tiny import tiny_model
from parallel import Box

NORM, HEAD = "model.norm.weight", "lm_head.weight"
SAVE = {"safetensors": save_file, "bin": torch.save}
TORCH = torch.load, torch.save
INDEXES = {"safetensors": "model.safetensors.index.json", "bin": "pytorch_model.bin.index.json"}
SHARDS = "model-00001-of-00002", "model-00002-of-00002"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"), "qwen2", tied=True)


@pytest.fixture
def model(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "model")


@pytest.fixture(params=SAVE)
def sharded(model, request):
    """The model in two files of either format."""
    weights, weight_map = list(load_file(model / "model.safetensors").items()), {}
    (model / "model.safetensors").unlink()
    for shard, some in zip(SHARDS, (dict(weights[:7]), dict(weights[7:])), strict=True):
        file = f"{shard}.{request.param}"
        SAVE[request.param](some, model / file)
        weight_map |= dict.fromkeys(some, file)
    (model / INDEXES[request.param]).write_text(json.dumps({"weight_map": weight_map}))
    return model


def refusal(folder) -> str:
    with pytest.raises(ValueError) as error:
        check_weights(folder, read_shape(folder))
    return str(error.value)


def edit_weights(folder, edit):
    weights = load_file(folder / "model.safetensors")
    if callable(edit):
        edit(weights)
    else:
        weights |= edit
    save_file(weights, folder / "model.safetensors")


def place_norm_in(folder, file):
    """Let the index place a norm in `file`."""
    (path,) = folder.glob("*.index.json")
    weight_map = json.loads(path.read_text())["weight_map"]
    path.write_text(json.dumps({"weight_map": weight_map | {NORM: file}}))


def stored(folder):
    """All tensors, read at the places that `check_weights` gives."""
    places = check_weights(folder, read_shape(folder))
    with closing(StoredTensors(places)) as tensors:
        return {n: read_tensor(tensors, n, Box.whole(place.shape)) for n, place in places.items()}


def test_check_weights_finds_one_file_and_many(pristine, sharded):
    expected = load_file(pristine / "model.safetensors")
    assert {name: value.shape for name, value in expected.items()} == hf_tensors(
        read_shape(pristine)
    )
    assert_same(stored(sharded), expected)
    for path in sharded.glob("model-*"):  # a single file goes before the files of an index
        path.unlink()
    torch.save(expected, sharded / "pytorch_model.bin")
    if (sharded / INDEXES["safetensors"]).exists():
        assert SHARDS[0] in refusal(sharded), "safetensors go first"
        (sharded / INDEXES["safetensors"]).unlink()
    assert_same(stored(sharded), expected)
    shutil.copy(pristine / "model.safetensors", sharded)
    (sharded / "pytorch_model.bin").write_bytes(b"an older copy")
    assert_same(stored(sharded), expected)


def test_check_weights_lists_all_faults(model):
    def change(weights):
        del weights[NORM], weights["model.layers.1.self_attn.k_proj.bias"]
        weights["model.layers.0.mlp.up_proj.bias"] = torch.zeros(96)
        weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(95, 64)
        weights["model.layers.0.mlp.gate_proj.weight"] = torch.zeros(96, 64, dtype=torch.int8)

    edit_weights(model, change)
    message = refusal(model)
    assert f"{NORM} [64] is missing" in message
    assert "model.layers.1.self_attn.k_proj.bias [32] is missing" in message
    assert "model.layers.0.mlp.up_proj.bias [96] is not part of the model" in message
    assert "up_proj.weight has shape [95, 64], config.json requires [96, 64]" in message
    assert "gate_proj.weight has dtype I8, supported: ['BF16', 'F16', 'F32', 'F64']" in message
    assert len(message.splitlines()) == 6


def test_check_weights_of_a_tied_head_that_is_saved(model):
    def save_head(weights):
        weights[HEAD] = weights["model.embed_tokens.weight"].clone()

    edit_weights(model, save_head)
    assert HEAD not in check_weights(model, read_shape(model))
    edit_weights(model, lambda weights: weights.update({HEAD: weights[HEAD].double()}))
    assert HEAD not in check_weights(model, read_shape(model))
    edit_weights(model, lambda weights: weights[HEAD][249, 63].add_(1.0))
    message = f"{HEAD} differs from the embedding that config.json ties it to: set tie_word_emb"
    assert message in refusal(model)
    edit_weights(model, lambda weights: weights.pop("model.embed_tokens.weight"))
    message = refusal(model)
    assert "model.embed_tokens.weight [250, 64] is missing" in message
    assert f"{HEAD} is stored without the embedding it is tied to: save it as" in message


def test_check_weights_refuses_an_adapter(model):
    (model / "adapter_config.json").write_text("{}")
    assert f"{model} has a LoRA adapter, which would be left out: merge it" in refusal(model)


def test_check_weights_passes_over_rotary_buffers(model):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(model, {name: torch.ones(8)})
    assert name not in check_weights(model, read_shape(model))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_check_weights_passes_over_mtp_layers(model, tmp_path, family):
    other, name = tiny_model(tmp_path / "other", family, num_mtp_layers=1), "eh_proj.weight"

    def add(folder, layer):
        edit_weights(folder, {f"model.layers.{layer}.{name}": torch.ones(8)})

    add(other, 3)
    assert f"model.layers.3.{name}" not in check_weights(other, read_shape(other))
    for folder, layer in ((other, 4), (model, 2)):
        add(folder, layer)
        assert f"model.layers.{layer}.{name} [8] is not part of the model" in refusal(folder)


# Indexes.


@pytest.mark.parametrize(
    ("file", "fault"),
    [
        ("../stolen.safetensors", "files outside the folder"),
        ("..", "files outside the folder"),
        ("", "files that are not there"),
        ("a\0b", "files that are not there"),
        ("\u00e4" * 128, "files that are not there"),
        ("absent", "files that are not there"),
    ],
)
def test_index_that_names_no_file_is_refused(sharded, file, fault):
    place_norm_in(sharded, file)
    assert f"{fault}: [{file!r}]" in refusal(sharded)


def test_index_that_names_the_wrong_shard_is_refused(sharded):
    (first,) = sharded.glob(f"{SHARDS[0]}.*")
    place_norm_in(sharded, first.name)
    assert f"tensors that are not there: ['{NORM} in {first.name}']" in refusal(sharded)


def test_shards_that_are_read_differently_are_refused(sharded):
    read, save = (load_file, save_file) if (sharded / INDEXES["safetensors"]).exists() else TORCH
    first, second = (next(sharded.glob(f"{shard}.*")) for shard in SHARDS)
    weights = read(first)
    name, values = next(iter(read(second).items()))
    save({**weights, name: values.clone()}, first)
    check_weights(sharded, read_shape(sharded))
    save({**weights, name: values + 1}, first)
    message = (
        f"says that {name} is in {second.name}, but {first.name} holds other values of that name"
    )
    assert message in refusal(sharded)
    save({**weights, HEAD: torch.ones(250, 64)}, first)
    assert f"{first.name} holds {HEAD}, which " in refusal(sharded)


@pytest.mark.parametrize(
    ("files", "index", "words"),
    [
        # vLLM and SGLang read the files of an index, or all; transformers takes one file first.
        ("model a b", ["a", "b"], "model.safetensors is read here and by transformers, a.saf"),
        ("model a b c", ["a", "b", "c"], "a.safetensors, b.safetensors and 1 more by vLLM"),
        ("model a", ["model", "a"], "a.safetensors by vLLM"),
        ("model consolidated", None, "consolidated.safetensors by vLLM"),
        ("model model-00001-of-00002", None, "model-00001-of-00002.safetensors by vLLM"),
        ("a pytorch_model.bin", None, "pytorch_model.bin is read here"),
        ("pytorch_model.bin a.bin", None, "a.bin by vLLM"),
        ("model pytorch_model.bin", None, None),
        ("model", ["model"], None),
        ("a b consolidated stray", ["a", "b"], None),
        ("pytorch_model.bin training_args.bin", None, None),
    ],
)
def test_two_sets_of_weights_are_refused_where_engines_would_read_the_other(
    model, files, index, words
):
    (model / "model.safetensors").rename(model / "whole")
    weights = load_file(model / "whole")
    for file in files.split():
        if file.endswith(".bin"):
            torch.save(weights, model / file)
        else:
            save_file(weights, model / f"{file}.safetensors")
    if index:
        weight_map = {
            name: f"{index[i % len(index)]}.safetensors" for i, name in enumerate(weights)
        }
        (model / INDEXES["safetensors"]).write_text(json.dumps({"weight_map": weight_map}))
    if words is None:
        check_weights(model, read_shape(model))
    else:
        message = refusal(model)
        assert f"{model} has two sets of weights: " in message and words in message


@pytest.mark.parametrize("index", [{}, {"weight_map": ["x"]}, {"weight_map": {"x": 1}}])
def test_index_without_a_map_is_named(sharded, index):
    (path,) = sharded.glob("*.index.json")
    path.write_text(json.dumps(index))
    assert f"{path} has no weight_map" in refusal(sharded)


@pytest.mark.parametrize(
    ("name", "message"),
    [("absent", "does not exist: "), ("config.json", "is a file: give its folder")],
)
def test_read_shape_names_a_path_that_is_no_folder(model, name, message):
    shape = read_shape(model)
    for read in (read_shape, lambda folder: check_weights(folder, shape)):
        with pytest.raises(ValueError, match=re.escape(f"{model / name} {message}")):
            read(model / name)


def test_check_weights_names_a_folder_without_weights(model):
    (model / "model.safetensors").unlink()
    message = refusal(model)
    assert "none of model.safetensors, model.safetensors.index.json," in message
    assert "pytorch_model.bin and pytorch_model.bin.index.json is there" in message


# Headers of safetensors files.


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_check_weights_names_a_truncated_file(model, keep):
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
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"x": {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [false, 8]}}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
        b'"y": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
    ],
)
def test_read_header_names_a_malformed_file(tmp_path, header):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ValueError, match=str(path)):
        read_header(path)


def test_read_header_reads_no_huge_header(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 36))
        file.truncate(1 << 37)
    with pytest.raises(ValueError, match="not a safetensors file"):
        read_header(path)
