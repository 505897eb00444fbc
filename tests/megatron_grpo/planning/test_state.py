"""Weights, gradients and optimizer of a rank, by the planner and by real ranks.

`test_instantiate.py` compares them with Megatron-Core's own, in every family.
"""

from math import prod

import pytest

from checkpoint_convert import hf_tensors, megatron_layout, read_shape
from helpers.models.tiny import tiny_model
from helpers.oracle.optimizers import BFLOAT16, KINDS, bytes_kept
from helpers.oracle.policies import tiny_config
from helpers.ranks.processes import run_ranks
from megatron_grpo.planning.state import stage_states, state_bytes
from megatron_grpo.policy.matrices import MAX_EXCHANGED
from parallel import ParallelDims

LLAMA, AIR = "Llama-3.1-8B", "GLM-4.5-Air"
OF_LLAMA = 8_030_261_248


@pytest.fixture
def state_of(job_of):
    """State of the first rank of a job."""

    def state_of(name, *overrides, **sizes):
        job = job_of(name, *overrides, dims=ParallelDims(**sizes))
        return state_bytes(job.cfg, job.shape, 0)

    return state_of


def test_stage_states_of_70b_on_64_ranks_by_hand(job_of):
    dims = ParallelDims(tensor=8, pipeline=4, data=2)
    job = job_of("Llama-3.3-70B", "grpo.beta=0.04", dims=dims)
    first = next(stage_states(job.cfg, job.shape))
    layout = megatron_layout(job.shape, dims, dims.coordinates(0), transformer_engine=True)
    # 20 layers of 8192 * (8192 + 2048 + 8192 + 3 * 28672) / 8 and two norms; an eighth of the
    # embedding.
    parameters = 20 * (8192 * (18432 + 3 * 28672) // 8 + 2 * 8192) + 8192 * 128256 // 8
    assert layout.num_elements == parameters
    assert (first.weights, first.reference) == (2 * parameters, 2 * parameters)
    assert first.gradients == 4 * parameters
    assert first.optimizer == 12 * parameters // 2  # shared by two data ranks
    assert first.total == pytest.approx(27.25e9 + 4.54e9, rel=1e-3)


FOLLOWS, REFRESH = "grpo.sync_ref_model=true", "grpo.ref_model_mixup_alpha=1.0"


@pytest.mark.parametrize(
    ("overrides", "per_weight"),
    [
        ([], 2),
        ([FOLLOWS], 2 + 4),  # and its float32 mixture
        ([FOLLOWS, REFRESH], 2),
        ([FOLLOWS, "model.dtype=float32"], 4),
    ],
)
def test_state_bytes_of_a_reference_that_follows_the_policy(state_of, overrides, per_weight):
    state = state_of(LLAMA, "grpo.beta=0.04", *overrides)
    assert 4 * state.reference / state.gradients == pytest.approx(per_weight)


def test_state_bytes_of_routers(state_of, job_of):
    """Their biases are in float32 and not trained, nor are frozen routers."""
    biases, routers = 45 * 128, 45 * 128 * 4096
    trained = sum(map(prod, hf_tensors(job_of(AIR).shape).values())) - biases
    follows = "grpo.beta=0.04", FOLLOWS
    half, full = (state_of(AIR, *follows, f"model.dtype={x}") for x in ("bfloat16", "float32"))
    assert half.weights == 2 * trained + 4 * biases
    assert half.reference == 2 * trained + 4 * trained + 4 * biases  # with its mixture
    assert (half.gradients, half.optimizer) == (4 * trained, 12 * trained)
    assert (full.weights, full.reference) == (4 * (trained + biases), 4 * (trained + biases))
    assert full.optimizer == 8 * trained
    frozen = state_of(AIR, *follows, "model.freeze_moe_router=true")
    assert (frozen.weights, frozen.reference) == (half.weights, half.reference)
    assert frozen.gradients == 4 * (trained - routers)
    assert frozen.optimizer == 12 * (trained - routers)


def test_stage_states_know_stages_with_other_layers(job_of):
    dims, model = ParallelDims(pipeline=4, expert=4, data=4), {"num_hidden_layers": 24}
    job = job_of(AIR, dims=dims, **model, first_k_dense_replace=7)
    states = list(stage_states(job.cfg, job.shape))
    assert states == [state_bytes(job.cfg, job.shape, 4 * stage) for stage in range(4)]
    # Six layers each: all of the first are dense, one of the second, none of the third.
    of_layer = 2 * 32 * 3 * 4096 * 1408
    assert [each.expert_weights for each in states] == [n * of_layer for n in (0, 5, 6, 6)]


# Optimizers

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
def test_state_bytes_of_an_optimizer_by_hand(state_of, kind):
    state = state_of(LLAMA, "grpo.beta=0.04", *KINDS[kind])
    *of_gpu, host = PER_ELEMENT[kind]
    found = state.optimizer, state.update, state.gradients
    assert [size / OF_LLAMA for size in found] == of_gpu
    # Gradients on the host are page-locked, and torch takes powers of two for each.
    assert host <= state.host / OF_LLAMA <= 1.25 * host
    assert state.total == state.weights + state.optimizer + state.gradients + state.reference


def test_state_bytes_copy_moments_of_two_dtypes_in_an_update(state_of):
    state = state_of(LLAMA, *KINDS["precise"], "optimizer.exp_avg_dtype=bfloat16")
    assert (state.optimizer, state.update) == (8 * OF_LLAMA, 4 * OF_LLAMA)


def test_state_bytes_of_muon_keep_one_moment_and_send_parts_of_split_matrices(state_of):
    matrices = 32 * 4096 * (4096 + 1024 + 1024 + 4096 + 3 * 14336)
    one, two = (state_of(LLAMA, "optimizer.optimizer=muon", tensor=n) for n in (1, 2))
    assert (one.optimizer, one.exchanged) == (12 * OF_LLAMA - 4 * matrices, 0)
    assert two.exchanged == 4 * matrices // 2 // 2
    # Megatron-Core fuses gate and up; Muon takes them as two matrices.
    assert one.update == two.update == 2 * 4 * MAX_EXCHANGED + 16 * 4096 * 14336


MODELS = [
    ("qwen3", ParallelDims(tensor=2, pipeline=2)),  # its embedding is tied over stages
    ("qwen3_moe", ParallelDims(data=2, expert=2)),
    ("qwen2", ParallelDims(pipeline=2, virtual_pipeline=2)),
    ("deepseek_v3", ParallelDims(data=2, expert=2)),
]
OF_OTHERS = ("float32", "half on the host")
"""Kinds for the last two models: a kind knows of no layers, so the others are slow tests."""
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
def test_state_bytes_are_those_of_real_ranks(tmp_path, kind, family, dims):
    folder = tiny_model(tmp_path, family, tied=family == "qwen3", num_hidden_layers=4)
    cfg = tiny_config(folder, dims, *BFLOAT16, *KINDS[kind])
    planned = [state_bytes(cfg, read_shape(folder), rank) for rank in range(dims.world_size)]
    kept = run_ranks(dims.world_size, bytes_kept, folder, dims, kind)
    if "half" not in kind:
        assert kept == [(each.optimizer, each.host, each.gradients) for each in planned]
        return
    for (on_gpu, on_host, gradients), state in zip(kept, planned, strict=True):
        assert gradients == state.gradients
        # The plan is at most a parameter above: here, an embedding.
        assert on_gpu <= state.optimizer and on_host <= state.host
        assert on_gpu > 0.5 * state.optimizer and on_host > 0.4 * state.host
