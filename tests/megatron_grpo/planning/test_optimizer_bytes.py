"""What each kind of optimizer takes on its GPU and its host, by the planner and by real ranks."""

import pytest

from checkpoint_convert import read_shape
from helpers.models.published import write_config
from helpers.models.tiny import tiny_model
from helpers.oracle.optimizers import BFLOAT16, KINDS, bytes_kept
from helpers.oracle.policies import tiny_config
from helpers.ranks.processes import run_ranks
from megatron_grpo.planning.state import state_bytes
from megatron_grpo.policy.matrices import MAX_EXCHANGED
from parallel import ParallelDims

# Bytes per element of an optimizer that one rank has alone: on the GPU, and more during an update;
# of gradients; and of the optimizer on the host.
PER_ELEMENT = {
    "float32": (12, 0, 4, 0),
    "short gradients": (12, 4, 2, 0),
    "precise": (2 + 8, 0, 4, 0),
    "precise, short gradients": (2 + 8, 0, 2, 0),
    "precise, short moments": (2 + 4, 0, 2, 0),
    "host": (0, 0, 4, 12 + 4),
}


@pytest.mark.parametrize("kind", PER_ELEMENT)
def test_bytes_per_element_by_hand(tmp_path, kind):
    folder = write_config(tmp_path, "Llama-3.1-8B")
    cfg = tiny_config(folder, ParallelDims(), *BFLOAT16, *KINDS[kind])
    state, parameters = state_bytes(cfg, read_shape(folder), 0), 8_030_261_248
    *of_gpu, host = PER_ELEMENT[kind]
    found = state.optimizer, state.update, state.gradients
    assert [size / parameters for size in found] == of_gpu
    # Gradients on the host are page-locked, and torch takes powers of two for each.
    assert host <= state.host / parameters <= 1.25 * host
    assert state.total == state.weights + state.optimizer + state.gradients + state.reference


def test_moments_of_two_dtypes_are_copied_during_an_update(tmp_path):
    folder = write_config(tmp_path, "Llama-3.1-8B")
    mixed = *KINDS["precise"], "optimizer.exp_avg_dtype=bfloat16"
    state = state_bytes(
        tiny_config(folder, ParallelDims(), *BFLOAT16, *mixed), read_shape(folder), 0
    )
    assert (state.optimizer, state.update) == (8 * 8_030_261_248, 4 * 8_030_261_248)


def test_muon_keeps_one_moment_of_matrices_and_sends_parts_of_those_that_are_split(tmp_path):
    folder = write_config(tmp_path, "Llama-3.1-8B")
    matrices = 32 * 4096 * (4096 + 1024 + 1024 + 4096 + 3 * 14336)
    one, two = (
        state_bytes(
            tiny_config(folder, dims, *BFLOAT16, "optimizer.optimizer=muon"), read_shape(folder), 0
        )
        for dims in (ParallelDims(), ParallelDims(tensor=2))
    )
    assert (one.optimizer, one.exchanged) == (12 * 8_030_261_248 - 4 * matrices, 0)
    assert two.exchanged == 4 * matrices // 2 // 2
    # Of gate and up, which Megatron-Core fuses, each is a matrix.
    assert one.update == two.update == 2 * 4 * MAX_EXCHANGED + 16 * 4096 * 14336


MODELS = [
    ("qwen3", ParallelDims(tensor=2, pipeline=2)),  # its embedding is tied over stages
    ("qwen3_moe", ParallelDims(data=2, expert=2)),
    ("qwen2", ParallelDims(pipeline=2, virtual_pipeline=2)),
    ("deepseek_v3", ParallelDims(data=2, expert=2)),
]
OF_OTHERS = ("float32", "half on the host")
"""Kinds that the last two models are tried with: a kind knows of no layers, so others are slow."""
CASES = [
    pytest.param(
        kind,
        *model,
        marks=[pytest.mark.slow] if model in MODELS[2:] and kind not in OF_OTHERS else [],
    )
    for model in MODELS
    for kind in KINDS
]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "family", "dims"), CASES, ids=str)
def test_real_ranks_keep_what_the_plan_says(tmp_path, kind, family, dims):
    folder = tiny_model(tmp_path, family, tied=family == "qwen3", num_hidden_layers=4)
    cfg = tiny_config(folder, dims, *BFLOAT16, *KINDS[kind])
    planned = [state_bytes(cfg, read_shape(folder), rank) for rank in range(dims.world_size)]
    kept = run_ranks(dims.world_size, bytes_kept, folder, dims, kind)
    if "half" not in kind:
        assert kept == [(each.optimizer, each.host, each.gradients) for each in planned]
        return
    for (on_gpu, on_host, gradients), state in zip(kept, planned, strict=True):
        assert gradients == state.gradients
        # Each is at most as planned, which is within one parameter: here, an embedding.
        assert on_gpu <= state.optimizer and on_host <= state.host
        assert on_gpu > 0.5 * state.optimizer and on_host > 0.4 * state.host
