"""Weights, gradients and optimizer of a rank, by the planner.

`test_instantiate.py` compares them with Megatron-Core's own, in every family.
"""

from math import prod

import pytest

from checkpoint_convert import hf_tensors, megatron_layout, read_shape
from helpers.models.published import write_config
from helpers.oracle.policies import tiny_config
from megatron_grpo.planning.state import StateBytes, stage_states, state_bytes
from parallel import ParallelDims


def test_70b_on_64_ranks_by_hand(tmp_path):
    folder = write_config(tmp_path, "Llama-3.3-70B")
    shape, dims = read_shape(folder), ParallelDims(tensor=8, pipeline=4, data=2)
    cfg = tiny_config(folder, dims, "model.dtype=bfloat16", "grpo.beta=0.04")
    first = next(stage_states(cfg, shape))
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


def test_biases_of_routers_are_float32_and_not_trained_nor_are_frozen_routers(tmp_path):
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
    routers = 45 * 128 * 4096
    frozen = state("bfloat16", *follows, "model.freeze_moe_router=true")
    assert (frozen.weights, frozen.reference) == (half.weights, half.reference)
    assert frozen.gradients == 4 * (trained - routers)
    assert frozen.optimizer == 12 * (trained - routers)


def test_a_stage_is_not_taken_for_one_with_other_layers(tmp_path):
    folder = write_config(tmp_path, "GLM-4.5-Air", num_hidden_layers=24, first_k_dense_replace=7)
    shape, dims = read_shape(folder), ParallelDims(pipeline=4, expert=4, data=4)
    cfg = tiny_config(folder, dims, "model.dtype=bfloat16")
    states = list(stage_states(cfg, shape))
    assert states == [state_bytes(cfg, shape, 4 * stage) for stage in range(4)]
    # Six layers each: all of the first are dense, one of the second, none of the third.
    assert [state.expert_weights for state in states] == [
        2 * layers * 32 * 3 * 4096 * 1408 for layers in (0, 5, 6, 6)
    ]
