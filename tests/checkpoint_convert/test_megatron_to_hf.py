"""Exports: any model comes back bit for bit, whatever the checkpoint's writer and layout."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoint_convert import read_shape
from checkpoint_convert.families import FAMILIES
from checkpoint_convert.megatron_to_hf import export_checkpoint
from checkpoint_convert.shape import differing_fields
from checkpoint_convert.sidecar import CHECKPOINT_FOLDER, copy_sidecar_files
from helpers.models.conversions import assert_same, config_of, round_trip, weights_of
from helpers.models.tiny import CONFIGS, mesh_for, stacked_experts, tiny_model, train
from helpers.oracle.policies import (
    LENGTHS,
    accumulate,
    pack_all,
    save_checkpoint,
    start_policy,
    unstacked,
)
from helpers.ranks.processes import run_ranks
from parallel import ParallelDims

MESH = ParallelDims(tensor=2, pipeline=2, virtual_pipeline=2)
EXPERT_MESH = ParallelDims(tensor=4, pipeline=2, virtual_pipeline=2, data=4, expert=4)


@pytest.fixture(scope="module")
def models(seven_layer_models):
    return seven_layer_models


@pytest.fixture(scope="module")
def llama(models):
    return models["llama"]


@pytest.mark.parametrize("family", CONFIGS)
def test_round_trip_is_bitwise(models, tmp_path, family):
    dims = mesh_for(family, EXPERT_MESH if FAMILIES[family].experts else MESH)
    out = round_trip(models[family], tmp_path, dims)
    # Without a folder of weights to follow, experts are stacked where the family allows it.
    found, expected = (unstacked(weights_of(x), read_shape(x)) for x in (out, models[family]))
    assert_same(found, expected)
    assert not differing_fields(read_shape(out), read_shape(models[family]), {"moe.stacks"})


@pytest.fixture(scope="module")
def stacks(tmp_path_factory):
    """A Qwen3.5 with separate experts, as transformers saves it, and stacked, as published."""
    folder = tmp_path_factory.mktemp("stacks")
    apart = tiny_model(folder / "apart", "qwen3_5_moe_text")
    return {"apart": apart, "joined": stacked_experts(apart, folder / "joined")}


def test_stacked_experts_are_the_same_model_to_transformers(stacks):
    apart, joined = (AutoModelForCausalLM.from_pretrained(stacks[name]) for name in stacks)
    assert_same(apart.state_dict(), joined.state_dict())


@pytest.mark.parametrize("source", ["apart", "joined"])
@pytest.mark.parametrize("like", ["apart", "joined"])
def test_round_trip_stacks_experts_as_the_given_folder(stacks, tmp_path, source, like):
    options = {"hf_config": stacks[like], "max_shard_bytes": 100_000}
    out = round_trip(stacks[source], tmp_path, ParallelDims(tensor=2, pipeline=2), **options)
    assert_same(weights_of(out), weights_of(stacks[like]))


def test_read_shape_without_weights_stacks_as_published(stacks, tmp_path):
    shutil.copy(stacks["apart"] / "config.json", tmp_path)
    assert read_shape(tmp_path).moe.stacks == "joined"
    index = {"weight_map": {"model.layers.0.mlp.experts.0.gate_proj.weight": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_shape(tmp_path).moe.stacks is None


# Checkpoints of a training run.


def train_and_save(rank, model, dims, run):
    """Train one step and save; returns this rank's (Hugging Face tensor, box, values)."""
    policy, groups = start_policy(rank, model, dims)
    accumulate(policy, groups, pack_all(LENGTHS, dims)[groups.coordinates.data :: dims.data])
    policy.optimizer.step()
    save_checkpoint(run, 1, policy, model, dims)
    parameters = policy.parameters()
    return [
        (piece.tensor, piece.box, parameters[piece.local].detach()[piece.local_box.slices].clone())
        for piece in policy.layout.pieces
    ]


TRAINED = {
    "deepseek_v3": ParallelDims(tensor=2, pipeline=2, expert=2, expert_tensor=1),
    "gpt_oss": ParallelDims(tensor=2, pipeline=2, expert=2, expert_tensor=1),
    "qwen3": ParallelDims(tensor=2, pipeline=2, virtual_pipeline=2),
    "qwen3_moe": ParallelDims(tensor=2, pipeline=2, expert=2, expert_tensor=1),
}


@pytest.fixture(scope="module")
def trained(models, tmp_path_factory):
    """(checkpoint with optimizer state, weights of the ranks) by family."""
    found = {}
    for family, dims in TRAINED.items():
        run, model = tmp_path_factory.mktemp(family), models[family]
        weights = {name: torch.full_like(t, torch.nan) for name, t in weights_of(model).items()}
        parts = unstacked(weights, read_shape(model))  # views
        for boxes in run_ranks(dims.world_size, train_and_save, model, dims, run):
            for name, box, values in boxes:
                parts[name][box.slices] = values
        found[family] = run / "checkpoints" / "step_1", weights
    return found


@pytest.mark.parametrize("family", TRAINED)
def test_export_has_the_weights_of_the_ranks(models, trained, tmp_path, family):
    checkpoint, weights = trained[family]
    before = weights_of(models[family])
    changed = [name for name in weights if not torch.equal(weights[name], before[name])]
    assert len(changed) > 0.9 * len(weights), "the step changed nothing"
    export_checkpoint(checkpoint, tmp_path / "hf", num_workers=2)
    assert_same(weights_of(tmp_path / "hf"), weights)


@pytest.fixture
def nameless(trained, tmp_path):
    """A checkpoint without a config, as other trainers write it."""
    folder = shutil.copytree(trained["qwen3"][0], tmp_path / "nameless")
    shutil.rmtree(folder / CHECKPOINT_FOLDER)
    return folder


def test_export_needs_a_config(models, nameless, tmp_path):
    with pytest.raises(ValueError, match="does not say which model it is: give --hf-config"):
        export_checkpoint(nameless, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    export_checkpoint(nameless, tmp_path / "hf", hf_config=models["qwen3"])


def test_export_refuses_the_config_of_another_model(models, nameless, tmp_path):
    with pytest.raises(ValueError, match=r"is not a checkpoint of the qwen2 model") as error:
        export_checkpoint(nameless, tmp_path / "hf", hf_config=models["qwen2"])
    for fault in (
        "linear_proj.bias [7, 64] is not part of the model",
        "q_layernorm.weight [7, 16] is not part of the model",
        "linear_qkv.weight has shape [7, 128, 64], the config requires [7, 96, 64]",
    ):
        assert fault in str(error.value)
    assert not (tmp_path / "hf").exists()


# Files, dtypes and sidecar.


def test_round_trip_converts_to_a_dtype(llama, tmp_path):
    out = round_trip(llama, tmp_path, ParallelDims(tensor=4), dtype="BF16")
    expected = {name: value.bfloat16() for name, value in weights_of(llama).items()}
    assert_same(weights_of(out), expected)
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


def sidecar(folder):
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    return {n: b for n, b in files.items() if n != "config.json" and "safetensors" not in n}


def test_round_trip_keeps_sidecar_files(llama, tmp_path):
    model = shutil.copytree(llama, tmp_path / "model")
    train(tmp_path, "unigram").rename(model / "tokenizer.model")
    (model / "tokenizer.json").write_text("\x00 no tokenizer at all")
    out = round_trip(model, tmp_path)
    assert "tokenizer.model" in sidecar(out)
    assert sidecar(out) == sidecar(model)
    assert config_of(out) == config_of(model)


def test_export_takes_sidecar_files_of_hf_config(llama, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    copy_sidecar_files(llama, own, "F32")
    (own / "chat_template.jinja").write_text("{{ messages }}")
    out = round_trip(llama, tmp_path, hf_config=own)
    assert AutoTokenizer.from_pretrained(out).chat_template == "{{ messages }}"


def test_round_trip_keeps_expert_biases_in_float32(tmp_path):
    model = tiny_model(tmp_path / "model", "glm4_moe")
    out = round_trip(model, tmp_path, import_dtype="BF16", dtype="F16")
    before, after = weights_of(model), weights_of(out)
    for name, values in after.items():
        if name.endswith("e_score_correction_bias"):
            assert torch.equal(values, before[name])
        else:
            assert values.dtype == torch.float16
