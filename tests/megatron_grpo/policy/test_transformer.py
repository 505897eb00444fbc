from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.moe import fused_a2a, moe_utils

from checkpoint_convert import ModelShape, MoeShape
from checkpoint_convert.shape import LatentShape
from megatron_grpo.config.megatron_fields import PERFORMANCE_FIELDS, ROUTER_LOSS_FIELDS
from megatron_grpo.policy import overrides, transformer, transformer_engine
from megatron_grpo.policy.overrides import check_context_exchange
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

LATENT = LatentShape(query_rank=None, rank=32, rotary_dim=8, value_dim=16)


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
    assert (config.recompute_granularity, config.num_layers) == ("selective", 5)
    assert config.params_dtype == torch.bfloat16
    # Megatron would wait for the GPU after each message, because of a fault of an old torch.
    assert not config.batch_p2p_sync
    assert configure(batch_p2p_sync=True).batch_p2p_sync
    assert configure(shape=MIXTURE).moe_router_dtype == "fp32"
    assert configure(shape=MIXTURE, moe_router_dtype="fp64").moe_router_dtype == "fp64"


def test_the_layers_of_transformer_engine_are_fused_by_default(monkeypatch):
    """As in Megatron's own training script; torch's layers have nothing to fuse with."""
    assert not configure().apply_rope_fusion
    assert not configure().bias_activation_fusion
    monkeypatch.setattr(transformer, "best_implementation", lambda dtype: "transformer_engine")
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", object())
    assert configure().apply_rope_fusion
    assert configure().bias_activation_fusion
    assert not configure(apply_rope_fusion=False).apply_rope_fusion
    assert not configure(transformer_impl="local").apply_rope_fusion
    names = ["permute", "permute_with_probs", "sort_chunks_by_index", "unpermute"]
    for name in [*names, "sort_chunks_by_index_with_probs"]:  # Transformer Engine's, if it is there
        monkeypatch.setattr(moe_utils, f"fused_{name}", object(), raising=False)
    assert configure(shape=MIXTURE).moe_permute_fusion
    assert not configure(shape=MIXTURE, transformer_impl="local").moe_permute_fusion
    assert not configure(shape=MIXTURE, moe_permute_fusion=False).moe_permute_fusion


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("recompute_granularty", "full", "recompute_granularty .*did you mean recompute_granular"),
        # Fields that might change the model's results, or that packed sequences lack.
        ("qk_clip", True, r"qk_clip is not supported.* recompute_granularity.*_loss"),
        ("cp_comm_type", "all_gather", r"'all_gather'; possible here: \['p2p', 'a2a'\]"),
        ("cp_comm_type", "p2p", "p2p is for Transformer Engine's attention"),
        ("tp_comm_overlap", True, "packed microbatches differ in length, and each of Transformer"),
        ("cuda_graph_impl", "local", "differ in length, and a graph repeats kernels"),
        ("moe_expert_capacity_factor", 1.0, "differ in length, and tokens would be dropped"),
        ("moe_token_dispatcher_type", "allgather", r"'allgather'; possible here: \['alltoall', 'f"),
        ("moe_token_dispatcher_type", "flex", "flex needs Transformer Engine's layers, on GPUs"),
        ("moe_flex_dispatcher_backend", "deepep", "does nothing without .*_type=flex"),
        ("moe_shared_expert_overlap", True, "needs a shared expert"),
        ("num_layers", 1, "model.megatron.num_layers is not free"),
        ("mtp_num_layers", 1, "model.megatron.mtp_num_layers: set model.mtp_num_layers"),
        ("mtp_loss_scaling_factor", 0.1, "mtp_loss_scaling_factor: .* any factor: leave it out"),
        ("calculate_per_token_loss", 1, "model.megatron.calculate_per_token_loss is not free"),
        (
            "num_layers_in_last_pipeline_stage",
            1,
            r"the model folder, parallel\.num_layers_in_last_pipeline_stage or the trainer",
        ),
        ("transformer_impl", "inference_optimized", "is 'inference_optimized'; possible"),
        ("gradient_accumulation_fusion", True, "needs Transformer Engine"),
        # Values that Megatron would ignore or fail on.
        ("attention_backend", "flsh", r"'flsh'; possible here: \['auto', 'flash', 'fused', 'unf"),
        ("moe_router_dtype", "bf16", r"'bf16'; possible here: \['fp32', 'fp64'\]"),
        ("moe_router_load_balancing_type", ["aux_loss"], r"possible here: \['aux_loss', 'none'"),
        ("moe_aux_loss_coeff", [0.1], r"\[0.1\]: use a number from 0 on"),
        ("moe_z_loss_coeff", "1e-3", "'1e-3': use a number from 0 on"),
    ],
)
def test_an_unavailable_override_is_refused(name, value, error):
    with pytest.raises(ValueError, match=error):
        configure(shape=MIXTURE, **{name: value})


@pytest.mark.parametrize(
    ("dims", "shape", "error"),
    [
        (ParallelDims(context=2), SHAPE, None),
        (ParallelDims(tensor=2, context=2), SHAPE, r"divides the 1 key-value head .*context\(2\)"),
        (ParallelDims(context=2), replace(SHAPE, head_dim=24, latent=LATENT), "has 24 and 16"),
    ],
    ids=str,
)
def test_context_ranks_exchange_heads_only_if_each_has_one(dims, shape, error):
    check_context_exchange("p2p", shape, dims, "transformer_engine")
    if error is None:
        check_context_exchange("a2a", shape, dims, "transformer_engine")
    else:
        with pytest.raises(ValueError, match=error):
            check_context_exchange("a2a", shape, dims, "transformer_engine")


def test_context_ranks_gather_keys_and_values_of_windows():
    shape, dims = replace(SHAPE, window=8, windowed_layers=(0,)), ParallelDims(context=2)
    with pytest.raises(ValueError, match=r"layers with windows .* leave it out"):
        check_context_exchange("p2p", shape, dims, "transformer_engine")


def test_a_flexible_dispatcher_needs_its_kernels_and_ranks_to_send_to(monkeypatch):
    monkeypatch.setattr(transformer, "best_implementation", lambda dtype: "transformer_engine")
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", object())
    dims, flex = ParallelDims(data=2, expert=2), {"moe_token_dispatcher_type": "flex"}
    plain = {"moe_permute_fusion": False}
    for backend, kernels in ("deepep", "fused_dispatch"), ("hybridep", "hybrid_ep_dispatch"):
        chosen = plain | flex | {"moe_flex_dispatcher_backend": backend}
        with pytest.raises(ValueError, match=f"with {backend} needs the package deep_ep"):
            configure(dims, MIXTURE, **chosen)
        monkeypatch.setattr(fused_a2a, kernels, object())
        config = configure(dims, MIXTURE, **chosen)
        assert config.moe_token_dispatcher_type == "flex"
        assert config.moe_hybridep_pad_uneven_dispatch_inputs
    with pytest.raises(ValueError, match="expert_tensor_parallel_size are 1: use alltoall"):
        configure(ParallelDims(data=2), MIXTURE, **plain, **flex)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (
            {"fp8": "e4m3"},
            r"needs Transformer Engine's layers in bfloat16, .* transformer_impl is local",
        ),
        ({"fp8": "e5m2"}, r"possible here: \['e4m3', 'hybrid'\]"),
        ({"fp8": "e4m3", "fp8_recipe": "delayed"}, r"'mxfp8', 'tensorwise'\], as its scales are"),
        (
            {"fp8": "e4m3", "num_layers_at_end_in_bf16": 2},
            "does nothing without .*first_last_layers",
        ),
        ({"fp8_recipe": "blockwise"}, "fp8_recipe does nothing without model.megatron.fp8"),
        ({"first_last_layers_bf16": True}, "first_last_layers_bf16 does nothing without"),
        ({"fp8_param": True}, "fp8_param is not supported"),
    ],
)
def test_products_in_fp8_need_transformer_engine(given, error):
    with pytest.raises(ValueError, match=error):
        configure(**given)


@pytest.fixture
def library(monkeypatch):
    """Stands for Transformer Engine: says whether the GPU has a recipe."""
    answers = {
        "is_fp8_available": (True, ""),
        "is_fp8_block_scaling_available": (True, ""),
        "is_mxfp8_available": (False, "it needs compute capability 10.0"),
    }
    functions = {name: partial(known, answer) for name, answer in answers.items()}
    monkeypatch.setattr(
        transformer_engine, "import_module", lambda name: SimpleNamespace(**functions)
    )


def known(answer: tuple[bool, str], *, return_reason: bool) -> tuple[bool, str]:
    assert return_reason
    return answer


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("shape", "dims", "recipe", "error"),
    [
        (SHAPE, ParallelDims(), None, "needs model.megatron.fp8_recipe: blockwise for Hopper"),
        (SHAPE, ParallelDims(), "mxfp8", "mxfp8 is not for this GPU: it needs compute capability"),
        (SHAPE, ParallelDims(tensor=4), "blockwise", "intermediate_size is 24 on a rank"),
        (
            replace(SHAPE, hidden_size=72),
            ParallelDims(),
            "tensorwise",
            "hidden_size is 72 on a rank",
        ),
        (
            replace(SHAPE, latent=replace(LATENT, rank=24)),
            *(ParallelDims(), "tensorwise", "kv_lora_rank is 24 on a rank"),
        ),
        (SHAPE, ParallelDims(tensor=2), "blockwise", None),
        (MIXTURE, ParallelDims(), "tensorwise", None),
    ],
)
def test_what_a_gpu_or_a_model_cannot_multiply_in_fp8_is_refused(
    shape, dims, recipe, error, monkeypatch
):
    settings = {"fp8": "e4m3"} | ({"fp8_recipe": recipe} if recipe else {})
    refused = pytest.raises(ValueError, match=error) if error else nullcontext()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with refused:
        transformer_engine.check_fp8(settings, shape, dims, torch.bfloat16, "transformer_engine")


ATTENTION = ["qkv_linear", "core_attn"]
OFFLOAD = {"fine_grained_activation_offloading": True, "offload_modules": ATTENTION}


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"offload_modules": None}, r"is None: .* of \['qkv_linear', 'core_attn', 'attn_proj', 'a"),
        ({"offload_modules": []}, "list some of"),
        ({"offload_modules": ["moe_act"]}, r"\['moe_act'\]: .* transformer_impl local"),
        ({"fine_grained_activation_offloading": False}, "offload_modules does nothing without"),
        ({"recompute_granularity": "full"}, "full has nothing to move"),
        ({"recompute_granularity": "selective"}, "has core_attn, but with core_attn in"),
    ],
    ids=str,
)
def test_offloading_of_activations_needs_modules_that_keep_some(changed, error):
    assert configure(**OFFLOAD).offload_modules == ATTENTION
    with pytest.raises(ValueError, match=error):
        configure(**OFFLOAD | changed)


def test_latent_attention_keeps_its_activations():
    with pytest.raises(
        ValueError, match=r"of \['attn_norm', 'mlp_norm'\], the modules of this|0\.19\.2"
    ):
        configure(shape=replace(SHAPE, latent=LATENT, head_dim=24), **OFFLOAD)


def test_losses_of_routers_are_refused_where_they_would_miss_something():
    shape = replace(MIXTURE, moe=replace(MIXTURE.moe, score_function="sigmoid"))
    assert not configure(shape=shape, moe_aux_loss_coeff=0.0).moe_aux_loss_coeff
    with pytest.raises(ValueError, match="would not see the biases by which this model chooses"):
        configure(shape=shape, moe_aux_loss_coeff=0.1)
    with pytest.raises(ValueError, match="moe_aux_loss_coeff needs a mixture of experts"):
        configure(moe_aux_loss_coeff=0.1)


def test_what_needs_transformer_engine_is_refused_without_it(monkeypatch):
    monkeypatch.setattr(overrides, "find_spec", lambda package: None)
    for name in overrides.TRANSFORMER_ENGINE_FUSIONS:
        with pytest.raises(ValueError, match=f"{name} needs Transformer Engine, which this host"):
            configure(shape=MIXTURE, **{name: True})
        assert not getattr(configure(shape=MIXTURE, **{name: False}), name)
    selective = {"recompute_granularity": "selective"}
    with pytest.raises(ValueError, match="has layernorm, which needs Transformer Engine"):
        configure(**selective, recompute_modules=["mlp", "layernorm"])
    assert configure(**selective, recompute_modules=["mlp"]).recompute_modules == ["mlp"]


def test_the_docs_list_every_field():
    listed = (Path(__file__).parents[3] / "docs" / "config.md").read_text()
    for name in (*PERFORMANCE_FIELDS, *ROUTER_LOSS_FIELDS):
        assert f"`{name}`" in listed, name


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
