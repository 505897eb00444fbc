from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from checkpoint_convert import ModelShape, MoeShape
from megatron_grpo.config.train import PERFORMANCE_FIELDS, ROUTER_LOSS_FIELDS
from megatron_grpo.policy import overrides, transformer
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
    with pytest.raises(ValueError, match="gradient_accumulation_fusion needs Transformer Engine"):
        configure(gradient_accumulation_fusion=True)


@pytest.mark.parametrize("name", overrides.TRANSFORMER_ENGINE_FUSIONS)
def test_fusions_of_transformer_engine_are_refused_without_it(name, monkeypatch):
    monkeypatch.setattr(overrides, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=f"{name} needs Transformer Engine, which this host lacks"):
        configure(shape=MIXTURE, **{name: True})
    assert not getattr(configure(shape=MIXTURE, **{name: False}), name)


def test_recomputed_norms_are_refused_without_transformer_engine(monkeypatch):
    monkeypatch.setattr(overrides, "find_spec", lambda package: None)
    selective = {"recompute_granularity": "selective"}
    with pytest.raises(ValueError, match="has layernorm, which needs Transformer Engine"):
        configure(**selective, recompute_modules=["mlp", "layernorm"])
    assert configure(**selective, recompute_modules=["mlp"]).recompute_modules == ["mlp"]


def test_an_unknown_override_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"recompute_granularty .*did you mean recompute_granular"):
        configure(recompute_granularty="full")


@pytest.mark.parametrize(
    "name",
    [
        "window_size",
        "cp_comm_type",  # packed sequences pass around a ring in every supported release
        "fused_single_qkv_rope",  # Megatron asserts that sequences are not packed
    ],
)
def test_a_field_that_might_change_what_the_model_computes_is_refused(name):
    with pytest.raises(
        ValueError, match=rf"{name} is not supported.* recompute_granularity.*_loss"
    ):
        configure(shape=MIXTURE, **{name: 1})


def test_the_loss_that_balances_experts_is_refused_where_biases_choose_them():
    shape = replace(MIXTURE, moe=replace(MIXTURE.moe, score_function="sigmoid"))
    assert not configure(shape=shape, moe_aux_loss_coeff=0.0).moe_aux_loss_coeff
    with pytest.raises(ValueError, match="would not see the biases by which this model chooses"):
        configure(shape=shape, moe_aux_loss_coeff=0.1)


def test_fields_of_mixtures_are_refused_for_a_dense_model():
    with pytest.raises(ValueError, match="moe_aux_loss_coeff needs a mixture of experts"):
        configure(moe_aux_loss_coeff=0.1)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("attention_backend", "flsh", r"'flsh'; possible here: \['auto', 'flash', 'fused', 'unf"),
        ("moe_router_dtype", "bf16", r"'bf16'; possible here: \['fp32', 'fp64'\]"),
        (
            "moe_router_load_balancing_type",
            "seq_aux_loss",
            r".*possible here: \['aux_loss', 'none'",
        ),
        ("moe_router_load_balancing_type", ["aux_loss"], r".*possible here: \['aux_loss', 'none'"),
        ("moe_aux_loss_coeff", [0.1], r"\[0.1\]: use a number from 0 on"),
        ("moe_z_loss_coeff", "1e-3", "'1e-3': use a number from 0 on"),
    ],
)
def test_values_that_megatron_would_ignore_or_stumble_over_are_refused(name, value, told):
    with pytest.raises(ValueError, match=f"model.megatron.{name} is {told}"):
        configure(shape=MIXTURE, **{name: value})


def test_the_docs_list_every_field():
    listed = (Path(__file__).parents[3] / "docs" / "config.md").read_text()
    for name in (*PERFORMANCE_FIELDS, *ROUTER_LOSS_FIELDS):
        assert f"`{name}`" in listed, name


def test_a_layer_implementation_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="transformer_impl is 'inference_optimized'; possible"):
        configure(transformer_impl="inference_optimized")


@pytest.mark.parametrize(
    "name",
    [
        "num_layers",  # the model
        "context_parallel_size",  # the mesh
        "calculate_per_token_loss",  # the trainer
        "perform_initialization",
        "fp8",
    ],
)
def test_what_the_model_the_mesh_or_the_trainer_decides_is_not_free(name):
    with pytest.raises(ValueError, match=f"model.megatron.{name} is not free"):
        configure(**{name: 1})


def test_a_field_that_parallel_has_too_is_named_there():
    name = "num_layers_in_last_pipeline_stage"
    with pytest.raises(ValueError, match=rf"the model folder, parallel\.{name} or the trainer"):
        configure(**{name: 1})


@pytest.mark.parametrize(
    ("dims", "stages"),
    [
        (ParallelDims(pipeline=2), [["embedding", 3], [2, "loss"]]),
        (ParallelDims(pipeline=3), [["embedding", 2], [2], [1, "loss"]]),
        (ParallelDims(pipeline=2, virtual_pipeline=2), [["embedding", 1, 1], [2, 1, "loss"]]),
        (
            ParallelDims(pipeline=2, num_layers_in_first_pipeline_stage=4),
            [["embedding", 4], [1, "loss"]],
        ),
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
