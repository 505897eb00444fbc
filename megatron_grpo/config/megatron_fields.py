"""Fields of Megatron-Core's TransformerConfig that `model.megatron` may set.

All others are determined by the model, the mesh or the trainer, would change what the model
computes, have no effect, or are not supported here.
"""

from collections.abc import Mapping
from typing import Any

from checkpoint_convert import ModelShape
from parallel import ParallelDims

PERFORMANCE_FIELDS = (
    "apply_rope_fusion",
    "attention_backend",
    "batch_p2p_sync",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "clone_scatter_output_in_embedding",
    "cp_comm_type",
    "deterministic_mode",
    "disable_bf16_reduced_precision_matmul",
    "fine_grained_activation_offloading",
    "first_last_layers_bf16",
    "fp8",
    "fp8_recipe",
    "gradient_accumulation_fusion",
    "min_offloaded_tensor_size",
    "moe_flex_dispatcher_backend",
    "moe_permute_fusion",
    "moe_router_dtype",
    "moe_router_fusion",
    "moe_shared_expert_overlap",
    "moe_token_dispatcher_type",
    "num_layers_at_end_in_bf16",
    "num_layers_at_start_in_bf16",
    "offload_modules",
    "recompute_granularity",
    "recompute_method",
    "recompute_modules",
    "recompute_num_layers",
    "transformer_impl",
)
"""Fields that change only speed, memory or rounding: a resumed run may change them."""

ROUTER_LOSS_FIELDS = ("moe_aux_loss_coeff", "moe_router_load_balancing_type", "moe_z_loss_coeff")
"""Fields of the auxiliary losses of routers, which change what the model learns."""

LEGAL_VALUES = {
    "attention_backend": ("auto", "flash", "fused", "unfused"),
    # Transformer Engine 2.11 has all_gather and a2a+p2p only for sequences that are not packed.
    "cp_comm_type": ("p2p", "a2a"),
    "fp8": ("e4m3", "hybrid"),
    # `delayed` scales by a history of earlier products, which checkpoints do not have.
    "fp8_recipe": ("blockwise", "mxfp8", "tensorwise"),
    "moe_flex_dispatcher_backend": ("deepep", "hybridep"),
    "moe_router_dtype": ("fp32", "fp64"),
    # A packed microbatch is many sequences, to which seq_aux_loss would give one loss. The weight
    # of global_aux_loss would depend on the number of data ranks.
    "moe_router_load_balancing_type": ("aux_loss", "none"),
    # allgather needs equally many tokens on all ranks, and packed microbatches differ in length.
    "moe_token_dispatcher_type": ("alltoall", "flex"),
}
"""Legal values of fields for which Megatron accepts more values, or ignores unknown ones."""

DEEPEP_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Numbers of ranks for which DeepEP has settings: `get_dispatch_config` in
deep_ep/buffers/legacy.py at commit dd758ca, which Megatron-Core calls. More than 8 ranks are in
nodes of 8."""


def uses_deepep(megatron: Mapping[str, Any]) -> bool:
    backend = megatron.get("moe_flex_dispatcher_backend", "deepep")
    return megatron.get("moe_token_dispatcher_type") == "flex" and backend == "deepep"


def token_multiple(megatron: Mapping[str, Any]) -> int:
    """Divisor of a rank's token count per microbatch; above 1 for FP8."""
    if not megatron.get("fp8"):
        return 1
    return 32 if megatron.get("fp8_recipe") == "mxfp8" else 16


def check_fp8_model(settings: Mapping[str, Any], shape: ModelShape, dims: ParallelDims) -> None:
    """Raise ValueError for a model that `fp8` cannot train on any GPU."""
    if not settings.get("fp8"):
        return
    prefix = f"model.megatron.fp8 {settings['fp8']}"
    if shape.indexer is not None:
        raise ValueError(
            f"{prefix} is not supported for a model with sparse attention: leave it out"
        )
    multiple = token_multiple(settings)  # kernels need it of rows (tokens) and columns alike
    for name, size in _sizes(shape, dims).items():
        if size % multiple:
            raise ValueError(
                f"{prefix} needs matrix sides that are multiples of {multiple}, and {name} is "
                f"{size} on a rank: leave it out"
            )


def _sizes(shape: ModelShape, dims: ParallelDims) -> dict[str, int]:
    """Sides of a rank's matrices that FP8 needs as multiples, by their names in messages."""
    sizes = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size // dims.tensor,
        "the width of attention": shape.num_attention_heads * shape.value_dim // dims.tensor,
    }
    if shape.moe is not None:
        sizes["moe_intermediate_size"] = shape.moe.intermediate_size // dims.expert_tensor
        sizes["the shared experts"] = shape.moe.shared_intermediate_size // dims.tensor
    if (linear := shape.linear) is not None:
        values = linear.num_value_heads * linear.value_dim
        sizes["the projections of linear attention"] = linear.projected_dim // dims.tensor
        sizes["the width of linear attention"] = values // dims.tensor
    if shape.latent is not None:
        sizes["kv_lora_rank"] = shape.latent.rank
        sizes["q_lora_rank"] = shape.latent.query_rank or 0
    return sizes
