"""Checks of `model.megatron`, whose fields override those of Megatron-Core's TransformerConfig."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from importlib.util import find_spec
from typing import Any

from checkpoint_convert import ModelShape
from megatron_grpo.config.megatron_fields import (
    LEGAL_VALUES,
    PERFORMANCE_FIELDS,
    ROUTER_LOSS_FIELDS,
)
from megatron_grpo.config.train import ParallelConfig
from parallel import ParallelDims
from parallel.words import counted

WGRAD_KERNELS = "fused_weight_gradient_mlp_cuda"
TRANSFORMER_ENGINE_FUSIONS = ("apply_rope_fusion", "moe_permute_fusion", "moe_router_fusion")
NOT_FOR_PACKED_SEQUENCES = {
    "tp_comm_overlap": "each of Transformer Engine's buffers for it takes inputs of one length",
    "cuda_graph_impl": "a graph repeats kernels for tensors of the same shapes",
    "enable_cuda_graph": "a graph repeats kernels for tensors of the same shapes",
    "external_cuda_graph": "a graph repeats kernels for tensors of the same shapes",
    "moe_expert_capacity_factor": "tokens would be dropped depending on others of a microbatch",
    "moe_pad_expert_input_to_capacity": "tokens would be dropped depending on others",
}
"""Reason to refuse each field that Megatron has for microbatches of one length."""
OF_MTP = {
    "mtp_num_layers": "set model.mtp_num_layers",
    "mtp_loss_scaling_factor": "the layer for multi-token prediction is trained apart from the "
    "policy, and updates of Adam are the same for any factor: leave it out",
}
"""Advice for Megatron's fields of MTP layers with a share of the policy's loss."""
WHY_NOT = {
    "fp8_recipe=delayed": ", as its scales are a history that checkpoints do not have",
}


def check_overrides(
    overrides: Mapping[str, Any],
    decided: Mapping[str, Any],
    best_implementation: str,
    flexible_backends: Collection[str],
) -> None:
    """Raise ValueError for an override that is not legal on this host.

    `decided`: fields that model, mesh and trainer determine. `best_implementation`: the value of
    ``transformer_impl`` without an override. `flexible_backends`: installed backends of the
    dispatcher ``flex``.
    """
    for name, value in overrides.items():
        _check_field(name, decided)
        if value not in LEGAL_VALUES.get(name, (value,)):
            possible = f"{[*LEGAL_VALUES[name]]}{WHY_NOT.get(f'{name}={value}', '')}"
            raise ValueError(f"model.megatron.{name} is {value!r}; possible here: {possible}")
        if name == "moe_aux_loss_coeff" and value and decided.get("moe_router_enable_expert_bias"):
            raise ValueError(
                f"model.megatron.{name} is {value!r}, but Megatron's loss would not see the biases "
                "by which this model chooses experts: leave it out"
            )
        if name.endswith("_loss_coeff") and not (isinstance(value, int | float) and value >= 0):
            raise ValueError(
                f"model.megatron.{name} is {value!r}: use a number from 0 on, such as 0.001"
            )
    for name in TRANSFORMER_ENGINE_FUSIONS:
        if overrides.get(name) and not find_spec("transformer_engine"):
            raise ValueError(
                f"model.megatron.{name} needs Transformer Engine, which this host lacks: run `bash "
                "requirements/gpu.sh`, or leave the field out"
            )
    # Megatron recomputes a norm with `CheckpointWithoutOutput`, which asks Transformer Engine
    # whether FP8 is on.
    recomputed = overrides.get("recompute_modules") or ()
    if "layernorm" in recomputed and not find_spec("transformer_engine"):
        raise ValueError(
            "model.megatron.recompute_modules has layernorm, which needs Transformer Engine, and "
            "this host lacks it: run `bash requirements/gpu.sh`, or leave layernorm out"
        )
    implementation = overrides.get("transformer_impl", best_implementation)
    _check_dispatcher(overrides, decided, implementation, flexible_backends)
    if implementation not in ("local", best_implementation):
        raise ValueError(
            f"model.megatron.transformer_impl is {implementation!r}; possible here: "
            f"{sorted({'local', best_implementation})}. Transformer Engine's layers need a GPU, "
            "model.dtype=bfloat16 and the package, which `bash requirements/gpu.sh` installs"
        )
    needs_apex = overrides.get("gradient_accumulation_fusion") and implementation == "local"
    if needs_apex and not find_spec(WGRAD_KERNELS):
        raise ValueError(
            "model.megatron.gradient_accumulation_fusion needs Transformer Engine's layers, or "
            f"Apex's {WGRAD_KERNELS}, and neither is here: leave it out"
        )


def refuse_idle(
    settings: Mapping[str, Any], names: Iterable[str], need: str, instead: str = "set that"
) -> None:
    """Raise ValueError if `settings` have a field of `names`, all idle without the field `need`."""
    for name in names:
        if name in settings:
            raise ValueError(
                f"model.megatron.{name} does nothing without model.megatron.{need}: {instead}, or "
                "leave it out"
            )


def check_activation_offload(
    settings: Mapping[str, Any], shape: ModelShape, implementation: str
) -> None:
    """Raise ValueError for fields of `fine_grained_activation_offloading` that cannot work here."""
    prefix, modules = "model.megatron.", settings.get("offload_modules")
    switch = f"{prefix}fine_grained_activation_offloading"
    if not settings.get("fine_grained_activation_offloading"):
        own = "offload_modules", "min_offloaded_tensor_size"
        refuse_idle(settings, own, "fine_grained_activation_offloading=true")
        return
    legal = _offloadable(shape, implementation)
    if not isinstance(modules, list) or not modules or not {*modules} <= {*legal}:
        raise ValueError(
            f"{prefix}offload_modules is {modules!r}: with {switch}, list some of {legal}, the "
            f"modules of this model with transformer_impl {implementation}"
        )
    if settings.get("recompute_granularity") == "full":
        raise ValueError(
            f"{switch} next to {prefix}recompute_granularity full has nothing to move, as layers "
            "keep no activations but their inputs: use selective, or leave one of the two out"
        )
    recomputed_modules = settings.get("recompute_modules") or ["core_attn"]
    if settings.get("recompute_granularity") != "selective":
        recomputed_modules = []
    # Recomputed modules keep nothing. A recomputed norm frees its output at once, which is the
    # saved input of the product after it.
    for recomputed, left in ("core_attn", "core_attn"), ("layernorm", "qkv_linear"):
        if recomputed in recomputed_modules and left in modules:
            raise ValueError(
                f"{prefix}offload_modules has {left}, but with {recomputed} in "
                f"{prefix}recompute_modules it saves nothing to move: leave one of the two out"
            )


def _offloadable(shape: ModelShape, implementation: str) -> list[str]:
    """Modules of a model's layers whose saved tensors Megatron marks."""
    # Our own modules mark nothing: attention with latents, and linear attention. Transformer Engine
    # fuses most norms into the next product, and only its layers have all experts in one module.
    is_fused = implementation != "local"
    is_plain = shape.latent is None and shape.linear is None
    modules = ["qkv_linear", "core_attn", "attn_proj"] * is_plain
    if shape.has_pre_norms:
        modules += ["attn_norm"] * (shape.latent is not None or not is_fused)
        modules += ["mlp_norm"] * (shape.moe is not None or not is_fused)
    if shape.moe is not None and is_fused:
        modules += ["expert_fc1", "moe_act"]
    return modules


def check_context_exchange(
    cp_comm_type: str, shape: ModelShape, dims: ParallelDims, implementation: str
) -> None:
    """Raise ValueError if context ranks cannot exchange keys and values by `cp_comm_type`."""
    if implementation == "local":
        raise ValueError(
            f"model.megatron.cp_comm_type {cp_comm_type} is for Transformer Engine's attention; "
            "torch's layers gather keys and values: leave it out"
        )
    if shape.window is not None or shape.has_sinks:
        raise ValueError(
            f"model.megatron.cp_comm_type {cp_comm_type} is for Transformer Engine's attention; "
            "layers with windows or sinks gather keys and values: leave it out"
        )
    heads = max(shape.num_key_value_heads // dims.tensor, 1)
    if cp_comm_type == "a2a" and heads % dims.context:
        raise ValueError(
            f"model.megatron.cp_comm_type a2a divides the {counted(heads, 'key-value head')} of a "
            f"tensor rank among context({dims.context}) ranks: use p2p"
        )
    if cp_comm_type == "a2a" and shape.head_dim != shape.value_dim:
        raise ValueError(
            "model.megatron.cp_comm_type a2a needs keys and values of one size, and this model has "
            f"{shape.head_dim} and {shape.value_dim}: use p2p"
        )


def _check_dispatcher(
    overrides: Mapping[str, Any],
    decided: Mapping[str, Any],
    implementation: str,
    flexible_backends: Collection[str],
) -> None:
    """Raise ValueError for fields of the dispatch of tokens to experts that cannot work here."""
    prefix = "model.megatron.moe_"
    if overrides.get("moe_shared_expert_overlap") and not decided.get(
        "moe_shared_expert_intermediate_size"
    ):
        raise ValueError(
            f"{prefix}shared_expert_overlap needs a shared expert, and this model has none: leave "
            "it out"
        )
    if overrides.get("moe_token_dispatcher_type") != "flex":
        own = ("moe_flex_dispatcher_backend",)
        refuse_idle(overrides, own, "moe_token_dispatcher_type=flex")
        return
    if implementation == "local":
        raise ValueError(
            f"{prefix}token_dispatcher_type flex needs Transformer Engine's layers, on GPUs: use "
            "alltoall"
        )
    if decided["expert_model_parallel_size"] * decided["expert_tensor_parallel_size"] == 1:
        raise ValueError(
            f"{prefix}token_dispatcher_type flex sends tokens to other ranks, and "
            "parallel.expert_parallel_size and expert_tensor_parallel_size are 1: use alltoall"
        )
    backend = overrides.get("moe_flex_dispatcher_backend", "deepep")
    if backend not in flexible_backends:
        branch = " of its branch hybrid-ep" if backend == "hybridep" else ""
        raise ValueError(
            f"{prefix}token_dispatcher_type flex with {backend} needs the package deep_ep{branch} "
            "(https://github.com/deepseek-ai/DeepEP), which does not import here: install it, or "
            "use alltoall"
        )


def _check_field(name: str, decided: Mapping[str, Any]) -> None:
    if name in NOT_FOR_PACKED_SEQUENCES:
        raise ValueError(
            f"model.megatron.{name} is not possible, as packed microbatches differ in length, and "
            f"{NOT_FOR_PACKED_SEQUENCES[name]}: leave it out"
        )
    if name in OF_MTP:
        raise ValueError(f"model.megatron.{name}: {OF_MTP[name]}")
    if name in decided:
        owner = f"parallel.{name}" if name in ParallelConfig.model_fields else "parallel.*"
        raise ValueError(
            f"model.megatron.{name} is not free: it is determined by the model folder, "
            f"{owner} or the trainer; leave it out"
        )
    free = (*PERFORMANCE_FIELDS, *ROUTER_LOSS_FIELDS)
    if name not in free:
        nearest = difflib.get_close_matches(name, free, n=1, cutoff=0.75)
        hint = f": did you mean {nearest[0]}?" if nearest else "."
        raise ValueError(
            f"model.megatron.{name} is not supported{hint} Fields that change only speed, memory "
            f"or rounding are {', '.join(PERFORMANCE_FIELDS)}; fields of routers' losses are "
            f"{', '.join(ROUTER_LOSS_FIELDS)}"
        )
    if name.startswith("moe_") and "num_moe_experts" not in decided:
        raise ValueError(
            f"model.megatron.{name} needs a mixture of experts, and this model is dense: "
            "leave it out"
        )
