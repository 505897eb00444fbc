"""FP8 in a plan, compared with hand calculations; see `test_golden_plans.py`, too."""

import pytest

from megatron_grpo.planning.activations import layer_bytes
from megatron_grpo.planning.card import CARDS
from megatron_grpo.planning.job_plan import plan_job
from megatron_grpo.planning.layer_kinds import layer_kinds
from megatron_grpo.planning.memory import rounded_weights, stages_memory
from megatron_grpo.planning.state import stage_states
from megatron_grpo.planning.step_time import stage_flops
from megatron_grpo.planning.workload import Computed
from parallel import ParallelDims

ONE_RANK, H100 = ParallelDims(), CARDS["h100"]
LLAMA, QWEN, V3 = "Llama-3.1-8B", "Qwen3-235B-A22B", "DeepSeek-V3"
IN_BLOCKS = 1 + 4 / 128
"""Bytes of a number with its part of the scale for 128 numbers of a token."""
LESS = 2 - IN_BLOCKS


@pytest.fixture
def in_fp8(job_of):
    """A job with a recipe of FP8, or in bfloat16, and more fields of Megatron-Core."""

    def in_fp8(name, *fields, recipe="blockwise", **options):
        given = [f"fp8: e4m3, fp8_recipe: {recipe}"] if recipe else []
        return job_of(name, f"model.megatron={{{', '.join([*given, *fields])}}}", **options)

    return in_fp8


def last_layer(job):
    return layer_bytes(job.cfg, layer_kinds(job.shape)[-1])


def test_layer_bytes_of_dense_layers_by_hand(in_fp8):
    """Without the input of the projection after attention, which attention keeps anyway."""
    norms = 2 * (2 * 4096 + IN_BLOCKS * 4096 + 4)
    attention = 2 * (4096 + 2 * 1024 + 4096) + 4 * 32
    mlp = 2 * 2 * 14336 + IN_BLOCKS * 14336
    assert last_layer(in_fp8(LLAMA)).kept == norms + attention + mlp
    tensorwise = last_layer(in_fp8(LLAMA, recipe="tensorwise")).kept
    assert tensorwise == 2 * (3 * 4096 + 4) + attention + 5 * 14336


@pytest.mark.parametrize(
    ("name", "in_8_bits"),
    [
        (QWEN, 4096 + 8 * (4096 + 1536)),  # both inputs of experts; their router keeps its own
        # Projections of latents, experts, and the shared expert, whose input the router keeps.
        (V3, 1536 + 512 + 8 * (7168 + 2048) + 2048),
    ],
)
def test_layer_bytes_of_mixtures_by_hand(in_fp8, name, in_8_bits):
    kept, plain = (last_layer(in_fp8(name, recipe=each)).kept for each in ("blockwise", None))
    assert plain - kept == LESS * in_8_bits


def test_layer_bytes_offload_tokens_of_experts_in_bfloat16_unless_mxfp8(in_fp8):
    leave = "fine_grained_activation_offloading: true", "offload_modules: [expert_fc1]"
    blocks, mx = (last_layer(in_fp8(QWEN, *leave, recipe=each)) for each in ("blockwise", "mxfp8"))
    assert (blocks.offloaded, mx.offloaded) == (2 * 8 * 4096, (1 + 1 / 32) * 8 * 4096)
    assert blocks.kept == mx.kept


LAYER = (8192 + 2 * 512) * 4096 + 8192 * 4096
"""Elements of the projections of attention in a layer of Qwen3-235B-A22B."""
EXPERT = 3 * 4096 * 1536


def test_rounded_weights_are_there_twice_in_training_and_once_without_gradients(in_fp8):
    dims = ParallelDims(pipeline=2, data=8, expert=8)
    few = ["first_last_layers_bf16: true", "num_layers_at_end_in_bf16: 0"]
    both, ends = (in_fp8(QWEN, *fields, dims=dims) for fields in ([], few))
    one = (1 + 4 / 128**2) * (LAYER + 16 * EXPERT)
    of_stages = [rounded_weights(ends.cfg, ends.shape, stage, backward=True) for stage in (0, 1)]
    assert of_stages == pytest.approx([2 * 46 * one, 2 * 47 * one], abs=1)
    alone = rounded_weights(both.cfg, both.shape, 0, backward=False)
    assert alone == pytest.approx(47 * one, abs=1)
    states = list(stage_states(both.cfg, both.shape))
    [with_fp8, *_], [without, *_] = (
        stages_memory(job, states, 4, None) for job in (both, in_fp8(QWEN, dims=dims, recipe=None))
    )
    more = with_fp8.phases["log-probabilities"] - without.phases["log-probabilities"]
    assert more == pytest.approx(47 * one, abs=2)


def test_stage_flops_in_fp8_take_half_the_time(in_fp8):
    work = Computed.of([1000])
    job, plain = in_fp8(QWEN, "first_last_layers_bf16: true"), in_fp8(QWEN, recipe=None)
    [operations], [as_bfloat16] = (
        stage_flops(job.cfg, job.shape, work, card) for card in (None, H100)
    )
    assert [operations] == stage_flops(plain.cfg, plain.shape, work)
    linear = 92 * 3 * 2 * (LAYER + 8 * EXPERT) * 1000
    assert operations - as_bfloat16 == pytest.approx((1 - 989 / 1979) * linear)


@pytest.mark.parametrize(
    ("card", "recipe"), [("a100", "tensorwise"), ("b200", "blockwise"), ("h100", "mxfp8")]
)
def test_plan_refuses_a_recipe_that_is_not_for_the_card(card, recipe, in_fp8):
    job = in_fp8(LLAMA, recipe=recipe, card=CARDS[card], num_gpus=8)
    with pytest.raises(ValueError, match=f"fp8_recipe {recipe} is not for this GPU"):
        plan_job(job)


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        (LLAMA, "float32", "needs Transformer Engine's layers in bfloat16"),
        ("DeepSeek-V3.2", "bfloat16", "not supported for a model with sparse attention"),
    ],
)
def test_plan_refuses_what_train_would_refuse(name, dtype, reason, job_of):
    fields = "model.megatron={fp8: e4m3, fp8_recipe: blockwise}"
    with pytest.raises(ValueError, match=reason):
        plan_job(job_of(name, fields, f"model.dtype={dtype}", num_gpus=8))
