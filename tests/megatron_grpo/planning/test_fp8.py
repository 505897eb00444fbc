"""What FP8 changes in a plan, compared with hand calculations."""

import pytest

from checkpoint_convert import read_shape
from helpers.models.published import write_config
from helpers.oracle.policies import tiny_config
from megatron_grpo.planning.activations import layer_bytes
from megatron_grpo.planning.card import CARDS
from megatron_grpo.planning.job_plan import plan_job
from megatron_grpo.planning.layer_kinds import layer_kinds
from megatron_grpo.planning.memory import rounded_weights, stages_memory
from megatron_grpo.planning.state import stage_states
from megatron_grpo.planning.step_time import stage_flops
from megatron_grpo.planning.workload import Computed, Job
from parallel import ParallelDims

ONE_RANK, H100 = ParallelDims(), CARDS["h100"]
IN_BLOCKS = 1 + 4 / 128
"""Bytes of a number and its part of a scale, of 128 numbers of a token."""
LESS = 2 - IN_BLOCKS


def config(folder, *megatron, dims=ONE_RANK, recipe="blockwise"):
    fields = f"fp8: e4m3, fp8_recipe: {recipe}, {', '.join(megatron)}" if recipe else ""
    long = "train.max_tokens_per_microbatch=1024"
    return tiny_config(
        folder, dims, "model.dtype=bfloat16", long, f"model.megatron={{{fields}}}", "grpo.beta=0"
    )


def kept(folder, *megatron, recipe="blockwise"):
    """Bytes per token of a layer of the model's last kind: in bfloat16, and in FP8."""
    kind = layer_kinds(read_shape(folder))[-1]
    cfg = config(folder, *megatron, recipe=recipe)
    plain = [each for each in megatron if "fp8" not in each]
    fields = f"model.megatron={{{', '.join(plain)}}}"
    bfloat16 = tiny_config(folder, ONE_RANK, "model.dtype=bfloat16", fields)
    return layer_bytes(bfloat16, kind).kept, layer_bytes(cfg, kind).kept


def test_dense_layers_keep_the_inputs_of_three_products_in_fp8(tmp_path):
    """Of Llama-3.1-8B, not that of the product after attention, which attention keeps anyway."""
    _, found = kept(write_config(tmp_path, "Llama-3.1-8B"))
    norms = 2 * (2 * 4096 + IN_BLOCKS * 4096 + 4)
    attention = 2 * (4096 + 2 * 1024 + 4096) + 4 * 32
    assert found == norms + attention + 2 * 2 * 14336 + IN_BLOCKS * 14336
    _, found = kept(tmp_path, recipe="tensorwise")
    assert found == 2 * (3 * 4096 + 4) + attention + 5 * 14336


def test_experts_keep_both_inputs_in_fp8_and_their_router_keeps_its_own(tmp_path):
    bfloat16, found = kept(write_config(tmp_path, "Qwen3-235B-A22B"))
    assert bfloat16 - found == LESS * (4096 + 8 * (4096 + 1536))


def test_projections_from_latents_keep_their_inputs_in_fp8(tmp_path):
    """And the shared expert of DeepSeek-V3 what the router keeps."""
    bfloat16, found = kept(write_config(tmp_path, "DeepSeek-V3"))
    up, experts, shared = 1536 + 512, 8 * (7168 + 2048), 2048
    assert bfloat16 - found == LESS * (up + experts + shared)


def test_experts_whose_tokens_leave_the_gpu_keep_them_in_bfloat16_unless_mxfp8(tmp_path):
    folder = write_config(tmp_path, "Qwen3-235B-A22B")
    leave = "fine_grained_activation_offloading: true", "offload_modules: [expert_fc1]"
    [kind], tokens = layer_kinds(read_shape(folder)), 8 * 4096
    blocks, mx = (
        layer_bytes(config(folder, *leave, recipe=recipe), kind)
        for recipe in ("blockwise", "mxfp8")
    )
    assert (blocks.offloaded, mx.offloaded) == (2 * tokens, (1 + 1 / 32) * tokens)
    assert blocks.kept == mx.kept


LAYER = (8192 + 2 * 512) * 4096 + 8192 * 4096
"""Elements of the projections of attention in a layer of Qwen3-235B-A22B."""
EXPERT = 3 * 4096 * 1536


def test_weights_in_fp8_are_there_twice_in_training_and_once_without_gradients(tmp_path):
    folder = write_config(tmp_path, "Qwen3-235B-A22B")
    shape = read_shape(folder)
    dims = ParallelDims(pipeline=2, data=8, expert=8)
    both, ends = (
        config(folder, *fields, dims=dims)
        for fields in ([], ["first_last_layers_bf16: true", "num_layers_at_end_in_bf16: 0"])
    )
    one = (1 + 4 / 128**2) * (LAYER + 16 * EXPERT)
    of_stages = [rounded_weights(ends, shape, stage, backward=True) for stage in (0, 1)]
    assert of_stages == pytest.approx([2 * 46 * one, 2 * 47 * one], abs=1)
    assert rounded_weights(both, shape, 0, backward=False) == pytest.approx(47 * one, abs=1)
    states = list(stage_states(both, shape))
    none = config(folder, dims=dims, recipe=None)
    [with_fp8, *_], [without, *_] = (
        stages_memory(Job(cfg, shape, H100, []), states, 4, None) for cfg in (both, none)
    )
    more = with_fp8.phases["log-probabilities"] - without.phases["log-probabilities"]
    assert more == pytest.approx(47 * one, abs=2)


def test_products_of_linear_layers_take_half_the_time(tmp_path):
    folder = write_config(tmp_path, "Qwen3-235B-A22B")
    shape, tokens = read_shape(folder), 1000
    work = Computed.of([tokens])
    cfg = config(folder, "first_last_layers_bf16: true")
    [operations] = stage_flops(cfg, shape, work)
    [in_bfloat16] = stage_flops(config(folder, recipe=None), shape, work)
    assert operations == in_bfloat16
    [as_bfloat16] = stage_flops(cfg, shape, work, H100)
    linear = 92 * 3 * 2 * (LAYER + 8 * EXPERT) * tokens
    assert operations - as_bfloat16 == pytest.approx((1 - 989 / 1979) * linear)


@pytest.mark.parametrize(
    ("card", "recipe"), [("a100", "tensorwise"), ("b200", "blockwise"), ("h100", "mxfp8")]
)
def test_a_recipe_that_is_not_for_the_card_is_refused(card, recipe, tmp_path):
    folder = write_config(tmp_path, "Llama-3.1-8B")
    job = Job(config(folder, recipe=recipe), read_shape(folder), CARDS[card], [1024], 8)
    with pytest.raises(ValueError, match=f"fp8_recipe {recipe} is not for this GPU"):
        plan_job(job)


def test_a_model_or_dtype_that_train_would_refuse_is_refused(tmp_path):
    def plan(name, *overrides):
        fields = "model.megatron={fp8: e4m3, fp8_recipe: blockwise}", "grpo.beta=0"
        cfg = tiny_config(write_config(tmp_path / name, name), ONE_RANK, *fields, *overrides)
        return plan_job(Job(cfg, read_shape(cfg.model.path), H100, [1024], 8))

    with pytest.raises(ValueError, match="needs Transformer Engine's layers in bfloat16"):
        plan("Llama-3.1-8B", "model.dtype=float32")
    with pytest.raises(ValueError, match="not supported for a model with sparse attention"):
        plan("DeepSeek-V3.2", "model.dtype=bfloat16")
