"""Weights, gradients and optimizer of a rank, by the planner; Megatron-Core's own are compared in
test_instantiate.py."""

from math import prod

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoint_convert import hf_tensors, megatron_layout, read_shape
from helpers.policies import tiny_config
from helpers.published_models import write_config
from megatron_grpo.planning.state import StateBytes, stage_states, state_bytes
from parallel import ParallelDims


def test_70b_on_64_ranks_by_hand(tmp_path):
    folder = write_config(tmp_path, "Llama-3.3-70B")
    shape, dims = read_shape(folder), ParallelDims(tensor=8, pipeline=4, data=2)
    cfg = tiny_config(folder, dims, "model.dtype=bfloat16", "grpo.beta=0.04")
    first = stage_states(cfg, shape)[0]
    layout = megatron_layout(shape, dims, dims.coordinates(0), transformer_engine=True)
    # 20 layers of 8192 * (8192 + 2048 + 8192 + 3 * 28672) / 8 and two norms; an eighth of the
    # embedding.
    parameters = 20 * (8192 * (18432 + 3 * 28672) // 8 + 2 * 8192) + 8192 * 128256 // 8
    assert layout.num_elements == parameters
    assert (first.weights, first.reference) == (2 * parameters, 2 * parameters)
    assert first.gradients == 4 * parameters
    assert first.optimizer == 12 * parameters // 2  # shared by two data ranks
    assert first.total == pytest.approx(27.25e9 + 4.54e9, rel=1e-3)


def test_a_reference_that_follows_the_policy_has_its_float32_mixture_beside_it(tmp_path):
    folder = write_config(tmp_path, "Llama-3.1-8B")
    shape, dims = read_shape(folder), ParallelDims()

    def bytes_per_weight(dtype: str, *overrides: str) -> float:
        cfg = tiny_config(folder, dims, f"model.dtype={dtype}", *overrides)
        state = state_bytes(cfg, shape, 0)
        return 4 * state.reference / state.gradients

    follows, refresh = "grpo.sync_ref_model=true", "grpo.ref_model_mixup_alpha=1.0"
    assert bytes_per_weight("bfloat16") == pytest.approx(2)
    assert bytes_per_weight("bfloat16", follows) == pytest.approx(2 + 4)
    assert bytes_per_weight("bfloat16", follows, refresh) == pytest.approx(2)
    assert bytes_per_weight("float32", follows) == pytest.approx(4)


def test_biases_of_routers_are_float32_and_not_trained(tmp_path):
    folder = write_config(tmp_path, "GLM-4.5-Air")
    shape = read_shape(folder)
    biases = 45 * 128
    trained = sum(map(prod, hf_tensors(shape).values())) - biases

    def state(dtype: str, *overrides: str) -> StateBytes:
        cfg = tiny_config(folder, ParallelDims(), f"model.dtype={dtype}", *overrides)
        return state_bytes(cfg, shape, 0)

    follows = "grpo.beta=0.04", "grpo.sync_ref_model=true"
    half, full = state("bfloat16", *follows), state("float32", *follows)
    assert half.weights == 2 * trained + 4 * biases
    assert half.reference == 2 * trained + 4 * trained + 4 * biases  # with its mixture
    assert half.gradients == 4 * trained
    assert half.optimizer == 12 * trained
    assert (full.weights, full.reference) == (4 * (trained + biases), 4 * (trained + biases))
    assert full.optimizer == 8 * trained


def test_latent_models_weigh_what_those_of_transformers_do(tmp_path):
    folder = write_config(tmp_path, "DeepSeek-V3")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    trained = sum(parameter.numel() for parameter in model.parameters())
    biases = sum(each.numel() for name, each in model.named_buffers() if "correction" in name)
    cfg = tiny_config(folder, ParallelDims(), "model.dtype=bfloat16")
    state = state_bytes(cfg, read_shape(folder), 0)
    assert state.weights == 2 * trained + 4 * biases
    assert (state.gradients, state.optimizer) == (4 * trained, 12 * trained)


def test_tensor_ranks_hold_projections_to_latents_whole(tmp_path):
    folder = write_config(tmp_path, "DeepSeek-V3")
    dims = ParallelDims(tensor=8, pipeline=61, expert=8, expert_tensor=1)
    cfg = tiny_config(folder, dims, "model.dtype=bfloat16")
    second = stage_states(cfg, read_shape(folder))[1]  # a dense layer
    down, norms = 7168 * (1536 + 512 + 64), 2 * 7168 + 1536 + 512
    up, output = 1536 * 128 * 192 + 512 * 128 * (128 + 128), 128 * 128 * 7168
    parameters = down + norms + (up + output + 3 * 7168 * 18432) // 8
    assert second.weights == 2 * parameters
    assert second.gradients == 4 * parameters


def test_a_stage_is_not_taken_for_one_with_other_layers(tmp_path):
    folder = write_config(tmp_path, "GLM-4.5-Air", num_hidden_layers=24, first_k_dense_replace=7)
    shape, dims = read_shape(folder), ParallelDims(pipeline=4, expert=4, data=4)
    cfg = tiny_config(folder, dims, "model.dtype=bfloat16")
    states = stage_states(cfg, shape)
    assert states == [state_bytes(cfg, shape, 4 * stage) for stage in range(4)]
    # Six layers each: all of the first are dense, one of the second, none of the third.
    assert [state.expert_weights for state in states] == [
        2 * layers * 32 * 3 * 4096 * 1408 for layers in (0, 5, 6, 6)
    ]


def test_shards_of_all_ranks_are_the_whole_optimizer(tmp_path):
    folder = write_config(tmp_path, "Llama-3.1-8B")
    shape, dims = read_shape(folder), ParallelDims(data=3, context=2)
    cfg = tiny_config(folder, dims, "model.dtype=bfloat16")
    shards = [state_bytes(cfg, shape, rank).optimizer for rank in range(6)]
    assert sum(shards) == 6 * state_bytes(cfg, shape, 0).weights
