"""Experts that weight files stack, or have one by one: Qwen3.5's are published in stacks, and
transformers saves each by itself."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from checkpoint_convert import read_shape
from checkpoint_convert.hf_to_megatron import import_checkpoint
from checkpoint_convert.megatron_to_hf import export_checkpoint
from helpers.models.conversions import assert_same, weights_of
from helpers.models.tiny import stacked_experts, tiny_model
from parallel import ParallelDims


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    apart = tiny_model(folder / "apart", "qwen3_5_moe_text")
    return {"apart": apart, "joined": stacked_experts(apart, folder / "joined")}


def test_both_are_the_same_model_to_transformers(models):
    apart, stacked = (AutoModelForCausalLM.from_pretrained(models[name]) for name in models)
    assert_same(apart.state_dict(), stacked.state_dict())


@pytest.mark.parametrize("source", ["apart", "joined"])
@pytest.mark.parametrize("like", ["apart", "joined"])
def test_an_export_has_them_as_the_folder_that_is_given(models, tmp_path, source, like):
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    import_checkpoint(models[source], checkpoint, ParallelDims(tensor=2, pipeline=2))
    export_checkpoint(checkpoint, out, hf_config=models[like], max_shard_bytes=100_000)
    assert_same(weights_of(out), weights_of(models[like]))


def test_without_weights_they_are_stacked_as_published(models, tmp_path):
    (tmp_path / "config.json").write_bytes((models["apart"] / "config.json").read_bytes())
    assert read_shape(tmp_path).moe.stacks == "joined"
    index = {"weight_map": {"model.layers.0.mlp.experts.0.gate_proj.weight": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_shape(tmp_path).moe.stacks is None
