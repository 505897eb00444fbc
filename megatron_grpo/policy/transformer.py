"""Megatron-Core's description of a model: TransformerConfig, and the modules of layers.

Modules are Transformer Engine's on GPUs and torch's elsewhere, with equal weights and results.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import fused_a2a, moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from checkpoint_convert import ModelShape, MoeShape
from checkpoint_convert.shape import Module
from megatron_grpo.policy.attention import packed_attention_of, use_variants, window_fields
from megatron_grpo.policy.linear_attention import (
    leave_out,
    linear_fields,
    use_gates,
    use_linear_attention,
)
from megatron_grpo.policy.mla import LatentAttention, WholeLinear
from megatron_grpo.policy.norms import RMSNorm, use_norms
from megatron_grpo.policy.overrides import (
    check_activation_offload,
    check_context_exchange,
    check_overrides,
)
from megatron_grpo.policy.rope import softmax_scale, yarn_scaling
from megatron_grpo.policy.sparse_attention import SparseAttention
from megatron_grpo.policy.transformer_engine import (
    best_implementation,
    check_fp8,
    check_transformer_engine,
)
from parallel import ParallelDims, pipeline_layers

ACTIVATIONS = {
    "silu": (silu, None, 0.0),
    "gelu_pytorch_tanh": (partial(gelu, approximate="tanh"), None, 0.0),
    "swigluoai": (quick_gelu, 7.0, 1.0),
    "relu2": (lambda x: relu(x).square(), None, 0.0),  # Megatron-Core's `squared_relu` compiles
}
"""(activation of the gate or only factor, limit of both factors or None, addend of the other)."""


def route_with_torch() -> None:
    """Multiply with torch in the routers of this process."""
    # `te_general_gemm` rounds float32 factors to TF32, whatever torch's `allow_tf32` is. Megatron
    # takes torch's product where the name is None.
    moe_utils.te_general_gemm = None


def uses_transformer_engine(config: TransformerConfig) -> bool:
    """Whether layers are Transformer Engine's, with norms fused into the next linear layer."""
    return config.transformer_impl == "transformer_engine"


def transformer_config(
    shape: ModelShape,
    dims: ParallelDims,
    *,
    dtype: torch.dtype,
    sequence_parallel: bool,
    overrides: Mapping[str, Any],
) -> TransformerConfig:
    """Megatron's config of one model; `overrides`: further fields, by Megatron's names.

    Layers are Transformer Engine's if CUDA is available and `dtype` has 16 bits, unless the
    override ``transformer_impl: local`` selects torch's. Raises ValueError if Transformer Engine
    should work but does not, for an override outside `megatron_fields`, and for one that needs a
    missing package.
    """
    if overrides.get("transformer_impl") != "local":
        check_transformer_engine(dtype, overrides.get("attention_backend"))
    free = {"transformer_impl": best_implementation(dtype)} | dict(overrides)
    # Megatron's default dispatcher, all-gather, needs equal lengths: refused with
    # `variable_seq_lengths`, even for dense models. `batch_p2p_sync` waits for the GPU after each
    # message, because of a bug in old releases of torch.
    free = {"moe_token_dispatcher_type": "alltoall", "batch_p2p_sync": False} | (
        _fusions(free["transformer_impl"], shape) | free
    )
    if free["transformer_impl"] == "transformer_engine":
        # Megatron's head, which never runs here, refuses the field without Apex's kernels. The
        # layers get it from `accumulate_in_products`.
        free.pop("gradient_accumulation_fusion", None)
    decided = (
        _architecture(shape)
        | _mesh(shape, dims, dtype, sequence_parallel)
        | _plain_sums()
        | {"perform_initialization": False}  # weights are read from files
    )
    if shape.moe is not None:
        _check_sequence_parallel(dims, sequence_parallel)
        route_with_torch()
        decided |= _moe(shape, shape.moe, free["transformer_impl"])
        is_fused = free["transformer_impl"] == "transformer_engine"
        # Scores of two experts may differ by less than bfloat16 can resolve.
        free = {"moe_router_dtype": "fp32", "moe_permute_fusion": is_fused} | free
        if shape.has_linear_biases:  # Megatron's grouped experts with biases refuse the fusion
            decided["bias_dropout_fusion"] = False
        decided["moe_hybridep_pad_uneven_dispatch_inputs"] = True  # ranks have unequal microbatches
    check_overrides(overrides, decided, best_implementation(dtype), _flexible_backends())
    check_activation_offload(overrides, shape, free["transformer_impl"])
    check_fp8(overrides, shape, dims, dtype, free["transformer_impl"])
    if "cp_comm_type" in free:
        check_context_exchange(free["cp_comm_type"], shape, dims, free["transformer_impl"])
    if "attention_backend" in free:
        free["attention_backend"] = AttnBackend[free["attention_backend"]]
    try:
        return TransformerConfig(**decided, **free)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"Megatron-Core refuses model.megatron {dict(overrides)}: {error}"
        ) from error


def _fusions(implementation: str, shape: ModelShape) -> dict[str, Any]:
    """Fusions that Megatron's training script enables on GPUs, and TransformerConfig does not.

    Unfused RoPE waits for the GPU twice per layer, for the lengths of sequences. Mixtures also get
    `moe_permute_fusion`, with their other fields.
    """
    fused = implementation == "transformer_engine"
    return {
        "apply_rope_fusion": fused,
        "bias_activation_fusion": fused and shape.activation in ("silu", "swigluoai"),
    }


def _flexible_backends() -> list[str]:
    kernels = {"deepep": fused_a2a.fused_dispatch, "hybridep": fused_a2a.hybrid_ep_dispatch}
    return [name for name, kernel in kernels.items() if kernel is not None]


def accumulate_in_products(chunk: torch.nn.Module, overrides: Mapping[str, Any]) -> None:
    """Let Transformer Engine's products add weight gradients to Megatron's float32 buffers.

    Otherwise each microbatch's gradient is rounded to the dtype of the weights, written, and added
    by another kernel. Torch's layers have no such products; with Apex the TransformerConfig gives
    them the override ``gradient_accumulation_fusion: true``. In FP8 the first microbatch of a
    schedule overwrites the buffer, so an optimizer step must be one schedule.
    """
    if not overrides.get("gradient_accumulation_fusion", True):
        return
    module: Any
    for module in chunk.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):  # read in each forward
            module.fuse_wgrad_accumulation = True


def block_spec(
    config: TransformerConfig, layers: range, shape: ModelShape, has_own_rows: bool
) -> TransformerBlockSubmodules:
    """Modules of the model chunk with `layers` of the model.

    `has_own_rows`: each token has a row of RoPE of its own, for shared prompts or images.
    """
    is_fused = uses_transformer_engine(config)
    norm: Any = LayerNormImpl if is_fused else RMSNorm

    @cache  # equal layers can share a spec: Megatron builds modules from it and does not change it
    def layer_spec(modules: tuple[Module, ...]) -> ModuleSpec:
        num_experts = config.num_moe_experts if "moe" in modules else None
        if is_fused:
            layer = fused_layer_spec(config, num_experts, shape, has_own_rows)
        else:
            layer = torch_layer_spec(num_experts, shape)
        _use_attention(layer, shape)
        use_norms(layer, shape, config, norm)
        if "linear" in modules and shape.linear is not None:
            use_linear_attention(layer, shape.linear)
        leave_out(layer, modules)
        return layer

    return TransformerBlockSubmodules(
        layer_specs=[layer_spec(shape.modules(layer)) for layer in layers],
        layer_norm=norm,
    )


def fused_layer_spec(
    config: TransformerConfig, num_experts: int | None, shape: ModelShape, has_own_rows: bool
) -> ModuleSpec:
    """Spec of Transformer Engine's layer, with `PackedAttention` where its own attention fails.

    It knows no shared prompts, no windows of sequences that context ranks split, and before 2.12 no
    sinks of packed sequences.
    """
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=num_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=_norms_queries(shape),
        multi_latent_attention=shape.latent is not None,
    )
    is_split = config.context_parallel_size > 1
    if has_own_rows or shape.has_sinks or (is_split and shape.window is not None):
        layer.submodules.self_attention.submodules.core_attention = packed_attention_of(shape)
    if not shape.has_pre_norms:
        attention = layer.submodules.self_attention.submodules
        attention.linear_qkv = TEColumnParallelLinear  # the usual class norms its input
        layer.submodules.mlp.keywords["submodules"].linear_fc1 = TEColumnParallelLinear
    return layer


def torch_layer_spec(num_experts: int | None, shape: ModelShape) -> ModuleSpec:
    """Spec of Megatron's local layer, with other norms and attention.

    Megatron's norms refuse sequence parallelism, its attention packed sequences and context ranks.
    """
    layer = get_gpt_layer_local_spec(
        num_experts=num_experts,
        qk_layernorm=_norms_queries(shape),
        multi_latent_attention=shape.latent is not None,
        normalization="RMSNorm",
    )
    modules, attention = layer.submodules, layer.submodules.self_attention.submodules
    modules.input_layernorm = modules.pre_mlp_layernorm = RMSNorm
    attention.core_attention = packed_attention_of(shape)
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    # Checkpoints use Transformer Engine's names, in which a fused norm belongs to the next linear
    # layer: unfused norms are renamed. Megatron's table covers only dense layers without latents.
    fused_norms = {} if num_experts else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    if shape.latent is None:
        fused_norms["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    else:
        attention.linear_q_down_proj = attention.linear_kv_down_proj = WholeLinear
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
        fused_norms |= {
            f"self_attention.{x}_layernorm.": f"self_attention.linear_{x}_up_proj.layer_norm_"
            for x in ("q", "kv")
        }
    modules.sharded_state_dict_keys_map = fused_norms if shape.has_pre_norms else {}
    return layer


def _use_attention(layer: ModuleSpec, shape: ModelShape) -> None:
    """Replace Megatron's attention where the model has another kind."""
    attention = layer.submodules.self_attention
    if shape.latent is not None:
        attention.module = LatentAttention
        attention.params |= {"latent": shape.latent, "head_dim": shape.head_dim}
    if shape.indexer is not None:
        attention.module = SparseAttention
        attention.params |= {"indexer": shape.indexer}
    use_variants(layer, shape)
    use_gates(layer, shape)


def _norms_queries(shape: ModelShape) -> bool:
    """`qk_layernorm`: Megatron's one switch for norms of heads and norms of latents."""
    return shape.qk_norm or shape.latent is not None


def _architecture(shape: ModelShape) -> dict[str, Any]:
    function, limit, offset = ACTIVATIONS[shape.activation]
    return {
        "softmax_scale": softmax_scale(shape, yarn_scaling(shape)),
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_key_value_heads,
        "kv_channels": shape.value_dim,
        "ffn_hidden_size": shape.intermediate_size,
        **window_fields(shape),
        **linear_fields(shape),
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.rms_norm_eps,
        "layernorm_zero_centered_gamma": shape.zero_centered_norms,
        "qk_layernorm": shape.qk_norm,
        "add_bias_linear": shape.has_linear_biases,
        "add_qkv_bias": shape.attention_bias,
        "softmax_type": "learnable" if shape.has_sinks else "vanilla",
        "gated_linear_unit": shape.has_gates,
        "activation_func": function,
        "activation_func_clamp_value": limit,
        "glu_linear_offset": offset,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _moe(shape: ModelShape, moe: MoeShape, implementation: str) -> dict[str, Any]:
    has_experts = [int("moe" in shape.modules(layer)) for layer in range(shape.num_layers)]
    return {
        # With a list, checkpoints have a key per layer: unequal layers cannot be stacked.
        "moe_layer_freq": 1 if shape.has_equal_layers else has_experts,
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.intermediate_size,
        "moe_router_topk": moe.experts_per_token,
        "moe_router_score_function": moe.score_function,
        # A softmax over the chosen logits equals the softmax over all, renormalized to sum to 1.
        "moe_router_pre_softmax": not moe.normalize_topk,
        "moe_router_topk_scaling_factor": None if moe.weight_scale == 1.0 else moe.weight_scale,
        "moe_router_num_groups": None if moe.num_groups == 1 else moe.num_groups,
        "moe_router_group_topk": None if moe.num_groups == 1 else moe.groups_per_token,
        "moe_router_enable_expert_bias": moe.has_choice_biases,
        "moe_shared_expert_intermediate_size": moe.shared_intermediate_size or None,
        "moe_shared_expert_gate": moe.has_shared_gate,
        # Every token goes to all of its experts. With a capacity, results would depend on the other
        # tokens of the microbatch, padding included.
        "moe_expert_capacity_factor": None,
        "moe_grouped_gemm": implementation == "transformer_engine",
    }


def _check_sequence_parallel(dims: ParallelDims, sequence_parallel: bool) -> None:
    """Without it, every tensor rank has all tokens, and would send each to its experts again."""
    if dims.tensor > 1 and not sequence_parallel:
        raise ValueError(
            f"a mixture of experts over tensor({dims.tensor}) needs sequence parallelism: leave "
            "parallel.sequence_parallel out, or set parallel.tensor_parallel_size to 1"
        )


def _mesh(
    shape: ModelShape, dims: ParallelDims, dtype: torch.dtype, sequence_parallel: bool
) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": dims.tensor,
        "sequence_parallel": sequence_parallel,
        "context_parallel_size": dims.context,
        "expert_model_parallel_size": dims.expert,
        "expert_tensor_parallel_size": dims.expert_tensor,
        "pipeline_model_parallel_size": dims.pipeline,
        "virtual_pipeline_model_parallel_size": (
            dims.virtual_pipeline if dims.virtual_pipeline > 1 else None
        ),
        "pipeline_model_parallel_layout": _pipeline_layout(shape.num_layers, dims),
        # Megatron refuses these next to a layout, which determines them already.
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        # With interleaving, every pair of stages communicates in both directions at once. Batched
        # messages of two stages would then be mixed up (gloo hangs); overlap uses two groups.
        "overlap_p2p_comm": dims.virtual_pipeline > 1,
        "batch_p2p_comm": dims.virtual_pipeline == 1,
        # Transformer Engine's buffers for it have a fixed length; packed microbatches vary.
        "tp_comm_overlap": False,
        "fp4": None,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Packed microbatches differ in length.
        "variable_seq_lengths": True,
        "deallocate_pipeline_outputs": True,
    }


def _pipeline_layout(num_layers: int, dims: ParallelDims) -> list[list[str]] | None:
    """Layer types of each model chunk, in model order; Megatron's form for uneven splits."""
    if dims.pipeline == 1:
        return None
    stages = pipeline_layers(num_layers, dims)
    chunks = [
        ["decoder"] * len(stages[stage][virtual])
        for virtual in range(dims.virtual_pipeline)
        for stage in range(dims.pipeline)
    ]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return chunks


def _plain_sums() -> dict[str, Any]:
    """Fields that switch off Megatron's divisions: loss weights are global, gradients are sums."""
    return {
        # No division by microbatches in the schedule, nor by data-parallel ranks in DDP ...
        "calculate_per_token_loss": True,
        # ... nor by the number of tokens, which the option above normally implies.
        "finalize_model_grads_func": _finalize_without_division,
        # The head does not run in Megatron, so its gradient cannot be deferred, and it predicts no
        # further tokens.
        "defer_embedding_wgrad_compute": False,
        "mtp_num_layers": None,
    }


def _finalize_without_division(
    model: Sequence[torch.nn.Module], num_tokens: Tensor | None, **kwargs: Any
) -> None:
    finalize_model_grads(model, None, **kwargs)
