"""Exports: every rank writes its own boxes, and the folder equals the model bit for bit."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoint_convert import check_weights, hf_tensors, megatron_layout, read_shape
from checkpoint_convert.formats import hf_folder
from checkpoint_convert.formats.safetensors_file import TensorPlace, read_header
from checkpoint_convert.hf_export import (
    create_export,
    finish_export,
    shard_bytes_for,
    write_weights,
)
from checkpoint_convert.weights import read_weights
from helpers.models import CONFIGS, tiny_model
from parallel import ParallelDims

MESHES = [  # tensor=4 exceeds the key-value heads; no pipeline divides the 7 layers
    ParallelDims(),
    ParallelDims(tensor=4),
    ParallelDims(pipeline=3, virtual_pipeline=2),
    ParallelDims(tensor=2, pipeline=2, virtual_pipeline=2),
    ParallelDims(tensor=4, pipeline=3),
    ParallelDims(tensor=2, context=2, data=2),
]
EXPERT_MESHES = [  # with replicas of whole experts, of parts of experts, or without
    ParallelDims(data=2, expert=2),
    ParallelDims(data=4, expert=2),
    ParallelDims(data=4, expert_tensor=4),
    ParallelDims(tensor=2, pipeline=3, expert=2, expert_tensor=1),
    ParallelDims(tensor=4, data=2, expert=2, expert_tensor=2),
    ParallelDims(
        tensor=2, pipeline=2, virtual_pipeline=2, context=2, data=2, expert=4, expert_tensor=1
    ),
]
MODELS = [(family, tied) for family in CONFIGS for tied in (False, True)]


def name_of(dims):
    experts = f" * ep({dims.expert}) etp({dims.expert_tensor})" if dims in EXPERT_MESHES else ""
    return f"{dims} vpp({dims.virtual_pipeline}){experts}"


MIXTURES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "mixtral", "qwen3_moe")
ROUND_TRIPS = [
    pytest.param(family, tied, dims, id=f"{family}-tied={tied}-{name_of(dims)}")
    for family, tied in MODELS
    for dims in MESHES + (EXPERT_MESHES if family in MIXTURES else [])
]


@pytest.fixture(scope="module")
def models(seven_layer_models):
    return seven_layer_models


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("llama"), "llama")


def load_rank(folder, shape, dims, rank, dtype=torch.float32):
    layout = megatron_layout(shape, dims, dims.coordinates(rank), transformer_engine=False)
    parameters = {n: torch.full(s, torch.nan, dtype=dtype) for n, s in layout.shapes.items()}
    read_weights(folder, shape, layout, parameters)
    return layout, parameters


def exported_weights(folder):
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def assert_same(weights, expected):
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == weights[name].dtype
        assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize(("family", "tied", "dims"), ROUND_TRIPS)
def test_the_ranks_load_and_write_back_the_whole_model_bitwise(
    models, tmp_path, family, tied, dims
):
    model = models[family, tied]
    shape = read_shape(model)
    create_export(tmp_path, model, shape, torch.float32, max_shard_bytes=150_000)
    for rank in range(dims.world_size):
        layout, parameters = load_rank(model, shape, dims, rank)
        assert not any(parameter.isnan().any() for parameter in parameters.values())
        write_weights(tmp_path, layout, parameters, first_file=rank)
    assert_same(exported_weights(tmp_path), load_file(model / "model.safetensors"))


@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_an_export_is_what_transformers_loads(models, tmp_path, family, tied):
    model, dims = models[family, tied], ParallelDims()
    shape = read_shape(model)
    create_export(tmp_path, model, shape, torch.float32, max_shard_bytes=100_000)
    write_weights(tmp_path, *load_rank(model, shape, dims, 0))
    tokens = torch.arange(250).reshape(2, 125)
    with torch.no_grad():
        logits = [
            AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
            for folder in (model, tmp_path)
        ]
    assert torch.equal(*logits)
    text = "What is 7 + 5?"
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (model, tmp_path)]
    assert tokenizers[0](text).input_ids == tokenizers[1](text).input_ids
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    assert read_shape(tmp_path) == shape


def test_an_export_is_converted_to_its_dtype_and_says_so(llama, tmp_path):
    shape, dims = read_shape(llama), ParallelDims(tensor=2)
    create_export(tmp_path, llama, shape, torch.bfloat16)
    for rank in range(2):
        write_weights(tmp_path, *load_rank(llama, shape, dims, rank))
    expected = load_file(llama / "model.safetensors")
    assert_same(
        load_file(tmp_path / "model.safetensors"),
        {name: tensor.to(torch.bfloat16) for name, tensor in expected.items()},
    )
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_new_weights_are_written_into_the_same_files_again_and_again(llama, tmp_path):
    shape, dims = read_shape(llama), ParallelDims(tensor=2, pipeline=2)
    create_export(tmp_path, llama, shape, torch.float32)
    ranks = [load_rank(llama, shape, dims, rank) for rank in range(4)]
    file = tmp_path / "model.safetensors"
    inode = file.stat().st_ino
    expected = load_file(llama / "model.safetensors")
    for _ in range(3):
        for layout, parameters in ranks:
            for parameter in parameters.values():
                parameter += 1.0
            write_weights(tmp_path, layout, parameters)
        expected = {name: tensor + 1.0 for name, tensor in expected.items()}
        assert_same(load_file(file), expected)
    assert file.stat().st_ino == inode


@pytest.mark.parametrize(
    ("first_file", "expected"), [(0, [1, 2, 3]), (1, [2, 3, 1]), (5, [3, 1, 2])]
)
def test_a_rank_begins_with_its_own_file_and_goes_round(
    llama, tmp_path, monkeypatch, first_file, expected
):
    shape, synced = read_shape(llama), []
    create_export(tmp_path, llama, shape, torch.float32, max_shard_bytes=150_000)
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(file.name).name))
    write_weights(tmp_path, *load_rank(llama, shape, ParallelDims(), 0), first_file)
    assert synced == [f"model-{number:05d}-of-00003.safetensors" for number in expected]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_opens_no_file_without_a_tensor_of_its_own(llama, tmp_path, monkeypatch, rank):
    shape, dims = read_shape(llama), ParallelDims(pipeline=2)
    create_export(tmp_path, llama, shape, torch.float32, max_shard_bytes=1)  # one file per tensor
    opened: list[str] = []

    def counted(path: Path) -> dict[str, TensorPlace]:
        opened.append(path.name)
        return read_header(path)

    monkeypatch.setattr(hf_folder, "read_header", counted)
    layout, parameters = load_rank(tmp_path, shape, dims, rank)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    own = sorted({index[piece.tensor] for piece in layout.pieces})
    assert opened == own
    assert 0.4 < len(own) / len(index) < 0.6
    opened.clear()
    write_weights(tmp_path, layout, parameters)
    assert opened == own


@pytest.mark.parametrize(
    ("num_writers", "num_bytes"), [(1, 5 * 10**9), (16, 2_560_000_000), (10**3, 10**9)]
)
def test_there_is_a_file_of_1_to_5_gb_for_every_rank_that_writes(llama, num_writers, num_bytes):
    shape = replace(read_shape(llama), num_layers=1, vocab_size=16 * 10**7, hidden_size=64)
    found = shard_bytes_for(num_writers, shape, torch.bfloat16)
    assert found == pytest.approx(num_bytes, rel=1e-5)  # embedding and head are 41 GB


def test_replicas_are_not_written(llama, tmp_path):
    shape, dims = read_shape(llama), ParallelDims(data=2, context=2)
    create_export(tmp_path, llama, shape, torch.float32)
    for rank in range(1, 4):
        write_weights(tmp_path, *load_rank(llama, shape, dims, rank))
    assert not any(tensor.any() for tensor in load_file(tmp_path / "model.safetensors").values())


def test_an_export_of_another_model_is_no_place_for_the_weights(llama, tmp_path):
    shape, dims = read_shape(llama), ParallelDims()
    create_export(tmp_path, llama, replace(shape, num_layers=1), torch.float32)
    with pytest.raises(AssertionError, match="elements of this rank"):
        write_weights(tmp_path, *load_rank(llama, shape, dims, 0))


@pytest.mark.parametrize("max_shard_bytes", [1, 30_000, 64_000, 10**9])
def test_shards_stay_below_their_limit_unless_one_tensor_exceeds_it(
    llama, tmp_path, max_shard_bytes
):
    shape = read_shape(llama)
    create_export(tmp_path, llama, shape, torch.float32, max_shard_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    for file in files:
        tensors = load_file(file)
        num_bytes = sum(4 * tensor.numel() for tensor in tensors.values())
        assert num_bytes <= max_shard_bytes or len(tensors) == 1
    if max_shard_bytes == 10**9:
        assert [file.name for file in files] == ["model.safetensors"]
    else:
        assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert {n: p.shape for n, p in check_weights(tmp_path, shape).items()} == hf_tensors(shape)


def test_only_sidecar_files_of_the_weights_are_copied(llama, tmp_path):
    source = shutil.copytree(llama, tmp_path / "source")
    for name in ("pytorch_model.bin", "model.safetensors.index.json", "modeling.py"):
        (source / name).write_text("stale")
    (source / "folder.json").mkdir()
    (source / "tokenizer.model").write_text("pieces")
    create_export(tmp_path / "out", source, read_shape(source), torch.float32)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
    }


def test_a_disk_too_full_is_told_before_anything_is_written(llama, tmp_path):
    huge = replace(read_shape(llama), vocab_size=10**13)
    with pytest.raises(ValueError, match="bytes free, but the weights take 2,560,000,000,"):
        create_export(tmp_path, llama, huge, torch.bfloat16)
    assert list(tmp_path.iterdir()) == []


def test_a_finished_export_takes_the_place_of_an_earlier_one(llama, tmp_path):
    shape, dims = read_shape(llama), ParallelDims()
    final, partial = tmp_path / "hf", tmp_path / "hf.partial"
    (tmp_path / "hf.replaced").mkdir()  # a run died between the two renames
    for note in ("first", "second"):
        create_export(partial, llama, shape, torch.float32)
        (partial / "note.txt").write_text(note)
        write_weights(partial, *load_rank(llama, shape, dims, 0))
        finish_export(partial, final)
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]
        assert (final / "note.txt").read_text() == note
        assert_same(load_file(final / "model.safetensors"), load_file(llama / "model.safetensors"))


@pytest.mark.parametrize("has_earlier", [True, False])
def test_a_complete_export_is_there_whenever_the_run_dies(has_earlier, tmp_path, monkeypatch):
    for name in ("hf.partial", "hf.replaced", *(["hf"] if has_earlier else [])):
        (tmp_path / name).mkdir()
    complete, seen = ({"hf", "hf.replaced"} if has_earlier else {"hf.replaced"}), []
    rename, remove = Path.rename, shutil.rmtree

    def look(change):
        def looked(*names):
            seen.append(complete & {path.name for path in tmp_path.iterdir()})
            change(*names)
            if names == (tmp_path / "hf.partial", tmp_path / "hf"):
                complete.add("hf")

        return looked

    monkeypatch.setattr(Path, "rename", look(rename))
    monkeypatch.setattr(shutil, "rmtree", look(remove))
    finish_export(tmp_path / "hf.partial", tmp_path / "hf")
    assert all(seen), seen
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_an_export_has_its_name_only_when_all_of_it_is_on_the_disk(llama, tmp_path, monkeypatch):
    partial, final, calls = tmp_path / "hf.partial", tmp_path / "hf", []
    create_export(partial, llama, read_shape(llama), torch.float32, max_shard_bytes=150_000)
    files, rename = set(partial.iterdir()), Path.rename
    monkeypatch.setattr(
        os, "fsync", lambda fd: calls.append(Path(f"/proc/self/fd/{fd}").readlink())
    )
    monkeypatch.setattr(Path, "rename", lambda *names: calls.append(names) or rename(*names))
    finish_export(partial, final)
    *synced, renamed, parent = calls
    assert {*files, partial} == set(synced)
    assert (renamed, parent) == ((partial, final), tmp_path)


def test_config_of_an_export_names_its_dtype_once_by_the_key_that_it_had(llama, tmp_path):
    source = shutil.copytree(llama, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    del config["dtype"]
    config["torch_dtype"] = "float32"
    (source / "config.json").write_text(json.dumps(config))
    create_export(tmp_path / "out", source, read_shape(source), torch.bfloat16)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["torch_dtype"] == "bfloat16"
    assert "dtype" not in written
