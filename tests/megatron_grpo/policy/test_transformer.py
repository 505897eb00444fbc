from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from checkpoint_convert import ModelShape, MoeShape
from megatron_grpo.policy import transformer
from megatron_grpo.policy.transformer import transformer_config
from parallel import ParallelDims

SHAPE = ModelShape(
    family="qwen3",
    num_layers=5,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=250,
    tie_word_embeddings=False,
    attention_bias=False,
    qk_norm=True,
    rope_theta=10_000.0,
    rope_scaling=None,
    rms_norm_eps=1e-6,
    max_position_embeddings=512,
    eos_token_ids=(1,),
)
MIXTURE = replace(
    SHAPE,
    moe=MoeShape(num_experts=4, experts_per_token=2, intermediate_size=48, normalize_topk=True),
)


def configure(dims: ParallelDims | None = None, shape: ModelShape = SHAPE, **overrides: Any) -> Any:
    return transformer_config(
        shape,
        dims or ParallelDims(),
        dtype=torch.bfloat16,
        sequence_parallel=False,
        overrides=overrides,
    )


def test_overrides_reach_megatron():
    config = configure(recompute_granularity="selective")
    assert config.recompute_granularity == "selective"
    assert config.num_layers == 5
    assert config.params_dtype == torch.bfloat16


def test_routers_compute_in_float32_unless_they_are_told_another_type():
    assert configure(shape=MIXTURE).moe_router_dtype == "fp32"
    assert configure(shape=MIXTURE, moe_router_dtype="fp64").moe_router_dtype == "fp64"


def test_the_layers_of_transformer_engine_are_fused_unless_they_are_told_not_to(monkeypatch):
    """As Megatron's own training script has it; torch's layers have nothing to fuse with."""
    assert not configure().apply_rope_fusion
    assert not configure().bias_activation_fusion
    monkeypatch.setattr(transformer, "_best_implementation", lambda dtype: "transformer_engine")
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", object())
    assert configure().apply_rope_fusion
    assert configure().bias_activation_fusion
    assert not configure(apply_rope_fusion=False).apply_rope_fusion
    assert not configure(transformer_impl="local").apply_rope_fusion


def test_fused_weight_gradients_are_refused_without_apex():
    with pytest.raises(ValueError, match="gradient_accumulation_fusion needs Apex's fused_weight_"):
        configure(gradient_accumulation_fusion=True)


def test_an_unknown_override_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"recompute_granularty .*did you mean recompute_granular"):
        configure(recompute_granularty="full")


def test_a_layer_implementation_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="transformer_impl is 'inference_optimized'; possible"):
        configure(transformer_impl="inference_optimized")


@pytest.mark.parametrize(
    "name",
    [
        "num_layers",
        "hidden_dropout",
        "calculate_per_token_loss",
        "context_parallel_size",
        "perform_initialization",
        "tp_comm_overlap",
        "fp8",
        "fp4",
    ],
)
def test_what_the_model_the_mesh_or_the_trainer_decides_is_not_free(name):
    with pytest.raises(ValueError, match=f"model.megatron.{name} is not free"):
        configure(**{name: 1})


@pytest.mark.parametrize(
    ("dims", "stages"),
    [
        (ParallelDims(pipeline=2), [["embedding", 3], [2, "loss"]]),
        (ParallelDims(pipeline=3), [["embedding", 2], [2], [1, "loss"]]),
        (ParallelDims(pipeline=2, virtual_pipeline=2), [["embedding", 1, 1], [2, 1, "loss"]]),
    ],
    ids=str,
)
def test_uneven_pipelines_have_all_layers_and_both_ends(dims, stages):
    layout = configure(dims).pipeline_model_parallel_layout.layout
    assert [
        [layer.name if layer.name != "decoder" else 1 for chunk in chunks for layer in chunk]
        for chunks in layout
    ] == [
        [one for item in stage for one in ([item] if isinstance(item, str) else [1] * item)]
        for stage in stages
    ]
