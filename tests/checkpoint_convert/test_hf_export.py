"""Exports: ranks write their own boxes, and the folder equals the model bit for bit."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checkpoint_convert import check_weights, hf_tensors, read_shape
from checkpoint_convert.formats import weight_files
from checkpoint_convert.formats.safetensors_file import TensorPlace, read_header
from checkpoint_convert.hf_export import (
    create_export,
    finish_export,
    shard_bytes_for,
    write_weights,
)
from checkpoint_convert.megatron import file_layout
from helpers.models.conversions import ONE_RANK, assert_same, rank_parameters, weights_of
from helpers.models.tiny import CONFIGS, mesh_for, tiny_model
from parallel import ParallelDims

OWN_FILES = (
    *("deepseek_v3", "gemma3_text", "gpt_oss", "llama", "minimax_m2", "nemotron_h", "phi3"),
    *("qwen3_5_moe_text", "qwen3_next"),
)
"""Each form of files once; test_megatron_to_hf.py has all families, which are slow here."""
# More tensor ranks than key-value heads; no pipeline divides the 7 layers; replicas.
MESHES = [
    *(
        pytest.param(
            family,
            mesh_for(family, ParallelDims(tensor=4, pipeline=3)),
            marks=[] if family in OWN_FILES else [pytest.mark.slow],
        )
        for family in CONFIGS
    ),
    ("llama", ParallelDims(tensor=2, pipeline=2, virtual_pipeline=2)),
    ("qwen2", ParallelDims(tensor=2, context=2, data=2)),
    # Replicas of whole experts, of parts of experts, and none.
    ("mixtral", ParallelDims(data=4, expert=2)),
    ("deepseek_v3", ParallelDims(tensor=2, pipeline=3, expert=2, expert_tensor=1)),
    # Ranks own alternate elements of a file, or whole files.
    ("gpt_oss", ParallelDims(tensor=2, pipeline=2, expert=4, expert_tensor=1, data=2)),
    ("glm4_moe", ParallelDims(tensor=4, data=2, expert=2, expert_tensor=2)),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("llama"), "llama")


def export(model, folder, dims=ONE_RANK, dtype=torch.float32, max_shard_bytes=10**9):
    """Create an export and write the weights of all ranks."""
    shape = read_shape(model)
    create_export(folder, model, shape, dtype, max_shard_bytes)
    for rank in range(dims.world_size):
        layout, parameters = rank_parameters(model, dims, rank)
        assert not any(parameter.isnan().any() for parameter in parameters.values())
        write_weights(folder, layout, parameters, rank, file_layout(shape))


@pytest.mark.long
@pytest.mark.parametrize(("family", "dims"), MESHES, ids=str)
def test_write_weights_of_all_ranks_is_bitwise(seven_layer_models, tmp_path, family, dims):
    model = seven_layer_models[family]
    export(model, tmp_path, dims, max_shard_bytes=150_000)
    assert_same(weights_of(tmp_path), weights_of(model))


def test_create_export_converts_and_says_so(llama, tmp_path):
    export(llama, tmp_path, ParallelDims(tensor=2), torch.bfloat16)
    expected = {name: tensor.bfloat16() for name, tensor in weights_of(llama).items()}
    assert_same(weights_of(tmp_path), expected)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_write_weights_again_into_the_same_files(llama, tmp_path):
    shape, dims = read_shape(llama), ParallelDims(tensor=2, pipeline=2)
    create_export(tmp_path, llama, shape, torch.float32)
    ranks = [rank_parameters(llama, dims, rank) for rank in range(4)]
    file = tmp_path / "model.safetensors"
    inode = file.stat().st_ino
    expected = weights_of(llama)
    for _ in range(3):
        for layout, parameters in ranks:
            for parameter in parameters.values():
                parameter += 1.0
            write_weights(tmp_path, layout, parameters)
        expected = {name: tensor + 1.0 for name, tensor in expected.items()}
        assert_same(weights_of(tmp_path), expected)
    assert file.stat().st_ino == inode


@pytest.mark.parametrize(("first_file", "expected"), [(0, [1, 2, 3]), (5, [3, 1, 2])])
def test_write_weights_begins_with_the_ranks_file(
    llama, tmp_path, monkeypatch, first_file, expected
):
    shape, synced = read_shape(llama), []
    create_export(tmp_path, llama, shape, torch.float32, max_shard_bytes=150_000)
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(file.name).name))
    write_weights(tmp_path, *rank_parameters(llama), first_file)
    assert synced == [f"model-{number:05d}-of-00003.safetensors" for number in expected]


@pytest.mark.parametrize("rank", [0, 1])
def test_write_weights_opens_files_of_own_tensors(llama, tmp_path, monkeypatch, rank):
    shape, dims = read_shape(llama), ParallelDims(pipeline=2)
    create_export(tmp_path, llama, shape, torch.float32, max_shard_bytes=1)  # one file per tensor
    opened: list[str] = []

    def counted(path: Path) -> dict[str, TensorPlace]:
        opened.append(path.name)
        return read_header(path)

    monkeypatch.setattr(weight_files, "read_header", counted)
    layout, parameters = rank_parameters(tmp_path, dims, rank)
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
def test_shard_bytes_for_is_a_file_for_each_writer(llama, num_writers, num_bytes):
    shape = replace(read_shape(llama), num_layers=1, vocab_size=16 * 10**7, hidden_size=64)
    found = shard_bytes_for(num_writers, shape, torch.bfloat16)
    assert found == pytest.approx(num_bytes, rel=1e-5)  # embedding and head are 41 GB


def test_write_weights_leaves_out_replicas(llama, tmp_path):
    shape, dims = read_shape(llama), ParallelDims(data=2, context=2)
    create_export(tmp_path, llama, shape, torch.float32)
    for rank in range(1, 4):
        write_weights(tmp_path, *rank_parameters(llama, dims, rank))
    assert not any(tensor.any() for tensor in weights_of(tmp_path).values())


@pytest.mark.parametrize(("max_shard_bytes", "first"), [(1, None), (64_000, None), (10**9, "")])
def test_create_export_limits_files_of_many_tensors(llama, tmp_path, max_shard_bytes, first):
    shape = read_shape(llama)
    create_export(tmp_path, llama, shape, torch.float32, max_shard_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    for file in files:
        tensors = load_file(file)
        num_bytes = sum(4 * tensor.numel() for tensor in tensors.values())
        assert num_bytes <= max_shard_bytes or len(tensors) == 1
    part = f"-00001-of-{len(files):05d}" if first is None else first
    assert files[0].name == f"model{part}.safetensors"
    assert {n: p.shape for n, p in check_weights(tmp_path, shape).items()} == hf_tensors(shape)


def test_finish_export_replaces_an_earlier_one(llama, tmp_path):
    final, partial = tmp_path / "hf", tmp_path / "hf.partial"
    (tmp_path / "hf.replaced").mkdir()  # a run died between the two renames
    for note in ("first", "second"):
        export(llama, partial)
        (partial / "note.txt").write_text(note)
        finish_export(partial, final)
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]
        assert (final / "note.txt").read_text() == note
        assert_same(weights_of(final), weights_of(llama))


@pytest.mark.parametrize("has_earlier", [True, False])
def test_finish_export_always_leaves_a_complete_folder(has_earlier, tmp_path, monkeypatch):
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


def test_finish_export_names_the_files_on_the_disk(llama, tmp_path, monkeypatch):
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
