"""config.json of a Hugging Face folder -> `ModelShape`, refusing what would change the numbers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint_convert.families import FAMILIES
from checkpoint_convert.families.description import Family
from checkpoint_convert.shape import ModelShape

# Values that every family carries over. Absent keys have these values.
_REQUIRED = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "quantization_config": None,
}
# Megatron-Core applies Llama 3's RoPE scaling with these numbers built in; only `factor` is free.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read_shape(folder: str | Path) -> ModelShape:
    """Shape of the model in `folder`, from config.json (and its end tokens from
    generation_config.json, which chat models keep up to date).

    Raises ValueError for a missing or broken file, an unsupported `model_type`, a missing key, and
    for any key whose value would change the model's numbers and is not carried over.
    """
    path = Path(folder) / "config.json"
    config = read_json(path)
    family = _family(path, config)
    _check_carried_over(path, family, config)
    rope = _rope_parameters(config)
    _check_rope(path, rope)
    values = {**family.defaults, **config}
    num_heads = _positive(path, values, "num_attention_heads")
    hidden_size = _positive(path, values, "hidden_size")
    values["num_key_value_heads"] = values["num_key_value_heads"] or num_heads
    values["head_dim"] = values["head_dim"] or hidden_size // num_heads
    num_kv_heads = _positive(path, values, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{path}: num_key_value_heads({num_kv_heads}) must divide "
            f"num_attention_heads({num_heads})"
        )
    return ModelShape(
        family=family.model_type,
        num_layers=_positive(path, values, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=_positive(path, values, "head_dim"),
        intermediate_size=_positive(path, values, "intermediate_size"),
        vocab_size=_positive(path, values, "vocab_size"),
        tie_word_embeddings=values["tie_word_embeddings"],
        attention_bias=family.attention_bias,
        qk_norm=family.qk_norm,
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=None if rope["rope_type"] == "default" else _without_theta(rope),
        rms_norm_eps=float(values["rms_norm_eps"]),
        max_position_embeddings=_positive(path, values, "max_position_embeddings"),
        eos_token_ids=_eos_token_ids(path, values),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError naming the file when there is none."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist: a Hugging Face model folder is wanted")
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, not an object")
    return value


def _family(path: Path, config: Mapping[str, Any]) -> Family:
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(
            f"{path}: model_type {model_type!r} is not supported; supported: {sorted(FAMILIES)}"
        )
    return FAMILIES[model_type]


def _positive(path: Path, values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if type(value) is not int or value < 1:
        raise ValueError(f"{path}: {key} is {value!r}; a whole number of at least 1 is wanted")
    return value


def _check_carried_over(path: Path, family: Family, config: Mapping[str, Any]) -> None:
    refused = [
        f"{key} is {config[key]!r}, only {carried!r} is supported"
        for key, carried in {**_REQUIRED, **family.required}.items()
        if key in config and config[key] != carried
    ]
    other_layers = sorted(set(config.get("layer_types") or []) - {"full_attention"})
    if other_layers:
        refused.append(f"layer_types contains {other_layers}, only 'full_attention' is supported")
    if refused:
        raise ValueError(
            f"{path} asks for what {family.model_type} cannot do here: " + "; ".join(refused)
        )


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE parameters in the form of transformers 5, from that form or the older one."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {"rope_theta": config.get("rope_theta", 10000.0), **scaling}
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type", "default")
    return rope


def _check_rope(path: Path, rope: Mapping[str, Any]) -> None:
    fixed: dict[str, Any] = {"partial_rotary_factor": 1.0}
    if rope["rope_type"] == "llama3":
        fixed |= _LLAMA3_ROPE
        if "factor" not in rope:
            raise ValueError(f"{path}: llama3 RoPE scaling without its factor")
    elif rope["rope_type"] != "default":
        raise ValueError(
            f"{path}: RoPE scaling {rope['rope_type']!r} is not supported; "
            "supported: 'default', 'llama3'"
        )
    for key, value in fixed.items():
        if rope.get(key, value) != value:
            raise ValueError(f"{path}: RoPE {key} is {rope[key]!r}, only {value!r} is supported")


def _without_theta(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in rope.items() if key != "rope_theta"}


def _eos_token_ids(path: Path, values: Mapping[str, Any]) -> tuple[int, ...]:
    generation = path.with_name("generation_config.json")
    eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
    if eos is None:
        eos = values["eos_token_id"]
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)
