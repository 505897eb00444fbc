"""Checks of `model.megatron`, whose fields override those of Megatron-Core's TransformerConfig."""

import difflib
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from megatron_grpo.config.train import (
    LEGAL_VALUES,
    PERFORMANCE_FIELDS,
    ROUTER_LOSS_FIELDS,
    ParallelConfig,
)

WGRAD_KERNELS = "fused_weight_gradient_mlp_cuda"
TRANSFORMER_ENGINE_FUSIONS = ("apply_rope_fusion", "moe_permute_fusion", "moe_router_fusion")


def check_overrides(
    overrides: Mapping[str, Any], decided: Mapping[str, Any], best_implementation: str
) -> None:
    """Raise ValueError for an override that is not legal on this host.

    `decided` are the fields that the model, the mesh and the trainer determine,
    `best_implementation` the value of ``transformer_impl`` unless it is overridden.
    """
    for name, value in overrides.items():
        _check_field(name, decided)
        if value not in LEGAL_VALUES.get(name, (value,)):
            raise ValueError(
                f"model.megatron.{name} is {value!r}; possible here: {[*LEGAL_VALUES[name]]}"
            )
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
    if "layernorm" in (overrides.get("recompute_modules") or ()):
        _check_layernorm()
    implementation = overrides.get("transformer_impl", best_implementation)
    if implementation not in ("local", best_implementation):
        raise ValueError(
            f"model.megatron.transformer_impl is {implementation!r}; "
            f"possible here: {sorted({'local', best_implementation})}"
        )
    needs_apex = overrides.get("gradient_accumulation_fusion") and implementation == "local"
    if needs_apex and not find_spec(WGRAD_KERNELS):
        raise ValueError(
            "model.megatron.gradient_accumulation_fusion needs Transformer Engine's layers, or "
            f"Apex's {WGRAD_KERNELS}, and neither is here: leave it out"
        )


def _check_layernorm() -> None:
    """Megatron recomputes a norm with a class that asks Transformer Engine whether FP8 is on."""
    if not find_spec("transformer_engine"):
        raise ValueError(
            "model.megatron.recompute_modules has layernorm, which needs Transformer Engine, and "
            "this host lacks it: run `bash requirements/gpu.sh`, or leave layernorm out"
        )


def _check_field(name: str, decided: Mapping[str, Any]) -> None:
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
            f"or rounding are {', '.join(PERFORMANCE_FIELDS)}; those of the routers' losses are "
            f"{', '.join(ROUTER_LOSS_FIELDS)}"
        )
    if name.startswith("moe_") and "num_moe_experts" not in decided:
        raise ValueError(
            f"model.megatron.{name} needs a mixture of experts, and this model is dense: "
            "leave it out"
        )
