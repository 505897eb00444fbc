"""Reads from config.json which kind of attention, or which module, each layer has."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint_convert.families.description import Family, Windows
from checkpoint_convert.folder import boolean, integer, number
from checkpoint_convert.shape import IndexerShape, LatentShape, LinearShape, Module

WINDOWED, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
"""Values of `layer_types` for a layer with a window, for one without, and for linear attention."""
# Entry for a layer with an indexer in per-layer lists of transformers' config.
_INDEXED = {"layer_types": "indexed_attention", "indexer_types": "full"}
_MAX_TIME_STEP_MIN = 1e-3
"""Largest supported `time_step_min`: published models have it, see `families/nemotron_h.py`."""
_LETTERS: dict[str, Module] = {"M": "linear", "*": "attention", "-": "mlp", "E": "moe"}
"""Letters of `hybrid_override_pattern`."""
_BLOCKS: dict[str, Module] = {
    "linear_attention": "linear",
    "mamba": "linear",
    "full_attention": "attention",
    "attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}
"""Names in `layers_block_type`, which transformers writes; earlier releases wrote the shorter
names."""


def read_windows(
    path: Path, config: Mapping[str, Any], family: Family
) -> tuple[int | None, tuple[int, ...]]:
    """(window, indices of the layers with it); (None, ()) if no layer has a window.

    `config` holds the values of the file at `path`. Raises ValueError for values that make no
    sense, or that transformers and vLLM would read differently.
    """
    windows = family.windows
    if windows is None:  # then `layer_types` is refused with the settings that all families lack
        return None, ()
    num_layers = integer(path, config, "num_hidden_layers")
    is_on = windows.switch is None or (
        config.get(windows.switch) and boolean(path, config, windows.switch)
    )
    window = None
    if is_on and config.get("sliding_window") is not None:
        window = integer(path, config, "sliding_window")
    if window is None and windows.rope_theta is not None and not config.get("layer_types"):
        raise ValueError(
            f"{path}: sliding_window is {config.get('sliding_window')!r}; transformers accepts "
            f"that only if layer_types says {FULL} for every layer"
        )
    own = _by_rule(path, config, windows, num_layers) if window else [FULL] * num_layers
    given = config.get("layer_types") or own
    possible = [FULL, WINDOWED] if window else [FULL]
    if not isinstance(given, list) or len(given) != num_layers:
        raise ValueError(
            f"{path}: layer_types is {given!r}; it must list {possible}, one for each of "
            f"num_hidden_layers({num_layers})"
        )
    if others := sorted({str(kind) for kind in given} - {*possible}):
        off = [key for key in ("sliding_window", windows.switch) if key]
        why = "" if window else f" with {', '.join(f'{key} {config.get(key)!r}' for key in off)}"
        raise ValueError(
            f"{path}: layer_types contains {others}, only {possible}{why} is supported"
        )
    if given != own and not windows.are_by_layer_types:
        raise ValueError(f"{path}: layer_types is {given}, only {own} is supported")
    layers = tuple(layer for layer, kind in enumerate(given) if kind == WINDOWED)
    return (window, layers) if layers else (None, ())


def _by_rule(path: Path, config: Mapping[str, Any], windows: Windows, num_layers: int) -> list[str]:
    """Kind of each layer by the family's rule, for a config without `layer_types`."""
    first, every = 0, 0
    if windows.first is not None:
        first = integer(path, config, windows.first, minimum=0)
    if windows.every is not None:
        every = (
            integer(path, config, windows.every)
            if isinstance(windows.every, str)
            else windows.every
        )
    return [
        # The last of each `every` layers: every = 4 makes three with a window, then one without.
        FULL if layer < first or (every and (layer + 1) % every == 0) else WINDOWED
        for layer in range(num_layers)
    ]


def read_indexer(
    path: Path, values: Mapping[str, Any], family: Family, latent: LatentShape | None
) -> IndexerShape | None:
    """The indexer of every layer; None: attention is not sparse.

    Raises ValueError for a layer without an indexer, and for sizes that contradict each other.
    """
    if family.indexer_pairs is None:
        return None
    num_layers = integer(path, values, "num_hidden_layers")
    for key, kind in _INDEXED.items():
        kinds = values.get(key)
        if kinds and kinds != [kind] * num_layers:
            raise ValueError(f"{path}: {key} must have {kind!r} for every layer, or be absent")
    if latent is None or latent.query_rank is None:
        raise ValueError(f"{path}: q_lora_rank is null; indexers need a latent of queries")
    head_dim = integer(path, values, "index_head_dim")
    if head_dim < latent.rotary_dim:
        raise ValueError(
            f"{path}: index_head_dim({head_dim}) must be at least "
            f"qk_rope_head_dim({latent.rotary_dim}), the part of it that RoPE rotates"
        )
    return IndexerShape(
        topk=integer(path, values, "index_topk"),
        num_heads=integer(path, values, "index_n_heads"),
        head_dim=head_dim,
        has_neighbouring_pairs=family.indexer_pairs == "neighbours",
    )


def read_blocks(path: Path, values: dict[str, Any]) -> tuple[Module, ...]:
    """Module of each layer. Also sets `num_hidden_layers` and `rms_norm_eps` in `values`, keys that
    other families have in config.json."""
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
    """(shape of linear attention, indices of its layers); (None, ()) without such layers."""
    if family.linear is None:
        return None, ()
    if family.linear == "mamba":
        layers = tuple(layer for layer, kind in enumerate(block_types) if kind == "linear")
        return _mamba(path, values), layers
    return _delta_rule(path, values)


def _mamba(path: Path, values: Mapping[str, Any]) -> LinearShape:
    num_groups, num_heads = (integer(path, values, key) for key in ("n_groups", "mamba_num_heads"))
    if (least := number(path, values, "time_step_min")) > _MAX_TIME_STEP_MIN:
        raise ValueError(
            f"{path}: time_step_min is {least:g}; it must be at most {_MAX_TIME_STEP_MIN:g}, as "
            "vLLM and Megatron-Core let steps be below it, and transformers does not"
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
