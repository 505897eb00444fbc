"""Reads which layers of a hybrid have linear attention, or which one module each layer has."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint_convert.config_values import integer, number
from checkpoint_convert.families.description import Family
from checkpoint_convert.shape import LinearShape, Module
from checkpoint_convert.windows import FULL

LINEAR = "linear_attention"
"""What `layer_types` has for a layer with linear attention."""
_LEAST_STEP = 1e-3
"""`time_step_min` of published models, to which the difference is small."""
_LETTERS: dict[str, Module] = {"M": "linear", "*": "attention", "-": "mlp", "E": "moe"}
"""Of `hybrid_override_pattern`."""
_BLOCKS: dict[str, Module] = {
    "linear_attention": "linear",
    "mamba": "linear",
    "full_attention": "attention",
    "attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}
"""Of `layers_block_type`, which transformers writes; earlier releases had the shorter names."""


def read_blocks(path: Path, values: dict[str, Any]) -> tuple[Module, ...]:
    """The module of each layer; sets the keys that other families have for their number, and for
    the epsilon of norms."""
    known, blocks = _BLOCKS, values.get("layers_block_type")
    if blocks is None:
        known, blocks = _LETTERS, values.get("hybrid_override_pattern")
    if not isinstance(blocks, list | str) or not all(str(block) in known for block in blocks):
        raise ValueError(
            f"{path}: layers_block_type is {values.get('layers_block_type')!r}, and "
            f"hybrid_override_pattern {values.get('hybrid_override_pattern')!r}; one of them must "
            f"list {[*_BLOCKS]}, or have the letters {', '.join(_LETTERS)}"
        )
    modules = tuple(known[str(block)] for block in blocks)
    if {"linear", "attention"} - {*modules}:
        raise ValueError(
            f"{path}: the layers are {blocks!r}; some must be Mamba-2's, and some attention"
        )
    values["num_hidden_layers"] = len(modules)
    values["rms_norm_eps"] = values["layer_norm_epsilon"]
    return modules


def read_linear(
    path: Path, values: Mapping[str, Any], family: Family, block_types: tuple[Module, ...]
) -> tuple[LinearShape | None, tuple[int, ...]]:
    """Linear attention, and the layers that have it."""
    if family.linear is None:
        return None, ()
    if family.linear == "mamba":
        layers = tuple(layer for layer, kind in enumerate(block_types) if kind == "linear")
        return _mamba(path, values), layers
    return _delta_rule(path, values)


def _mamba(path: Path, values: Mapping[str, Any]) -> LinearShape:
    num_groups, num_heads = (integer(path, values, key) for key in ("n_groups", "mamba_num_heads"))
    if (least := number(path, values, "time_step_min")) > _LEAST_STEP:
        raise ValueError(
            f"{path}: time_step_min is {least:g}; it must be at most {_LEAST_STEP:g}, as vLLM and "
            "Megatron-Core let steps be below it, and transformers does not"
        )
    if num_heads % num_groups:
        raise ValueError(f"{path}: n_groups({num_groups}) must divide mamba_num_heads({num_heads})")
    return LinearShape(
        is_mamba=True,
        num_key_heads=num_groups,
        num_value_heads=num_heads,
        key_dim=integer(path, values, "ssm_state_size"),
        value_dim=integer(path, values, "mamba_head_dim"),
        kernel_size=integer(path, values, "conv_kernel"),
    )


def _delta_rule(
    path: Path, values: Mapping[str, Any]
) -> tuple[LinearShape | None, tuple[int, ...]]:
    num_layers = integer(path, values, "num_hidden_layers")
    kinds = values["layer_types"]
    if not kinds:
        every = integer(path, values, "full_attention_interval")
        kinds = [FULL if (i + 1) % every == 0 else LINEAR for i in range(num_layers)]
    known = [FULL, LINEAR]
    is_list = isinstance(kinds, list) and all(kind in known for kind in kinds)
    if not is_list or len(kinds) != num_layers or FULL not in kinds:
        raise ValueError(
            f"{path}: layer_types is {kinds!r}; it must list {known}, one for each of "
            f"num_hidden_layers({num_layers}), and {FULL} at least once"
        )
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
    if not layers:
        return None, ()
    gate = values.get("output_gate_type")  # only vLLM reads it
    if gate not in (None, "silu", "swish"):
        raise ValueError(f"{path}: output_gate_type is {gate!r}, only 'silu' is supported")
    num_keys, num_values = (
        integer(path, values, f"linear_num_{x}_heads") for x in ("key", "value")
    )
    if num_values % num_keys:
        raise ValueError(
            f"{path}: linear_num_key_heads({num_keys}) must divide "
            f"linear_num_value_heads({num_values})"
        )
    shape = LinearShape(
        num_key_heads=num_keys,
        num_value_heads=num_values,
        key_dim=integer(path, values, "linear_key_head_dim"),
        value_dim=integer(path, values, "linear_value_head_dim"),
        kernel_size=integer(path, values, "linear_conv_kernel_dim"),
    )
    return shape, layers
