"""Reads the RoPE settings of config.json; refuses any that would change what is computed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint_convert.config_values import number

# Parameters with one supported value for every RoPE type; vLLM reads the last two.
_REQUIRED = {"partial_rotary_factor": 1.0, "rope_dim": None, "use_fope": False}
# The supported RoPE types, and further parameters with one supported value: Megatron-Core has these
# numbers of Llama 3's scaling built in.
_REQUIRED_OF_TYPE: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {},
    "llama3": {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def read_rope(path: Path, config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """The base of RoPE, and the `rope_type` and parameters of its scaling, or None without scaling.

    `config` holds the values of the file at `path`. Raises ValueError for unsupported settings.
    """
    rope = _parameters(path, config)
    _check(path, rope)
    theta = number(path, rope, "rope_theta")
    if rope["rope_type"] == "default":
        return theta, None
    counting = ("rope_type", "factor", *_REQUIRED_OF_TYPE[rope["rope_type"]])
    return theta, {key: value for key, value in rope.items() if key in counting}


def _parameters(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE parameters in the format of transformers 5, from that format or the older one."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.get(key) or {}
    if not isinstance(scaling, dict):
        raise ValueError(f"{path}: {key} is {scaling!r}; it must be null or an object")
    scaling = dict(scaling)
    rope_type = scaling.pop("rope_type", scaling.pop("type", "default"))
    # A value at the top level of config.json takes precedence in transformers and vLLM.
    trained_length = "original_max_position_embeddings"
    if rope_type == "llama3" and trained_length in config:
        scaling[trained_length] = config[trained_length]
    return {"rope_theta": config.get("rope_theta", 10000.0), **scaling, "rope_type": rope_type}


def _check(path: Path, rope: Mapping[str, Any]) -> None:
    rope_type = rope["rope_type"]
    if rope_type not in list(_REQUIRED_OF_TYPE):  # a list, as a JSON value may be unhashable
        raise ValueError(
            f"{path}: RoPE scaling {rope_type!r} is not supported; "
            f"supported: {sorted(_REQUIRED_OF_TYPE)}"
        )
    by_layer = sorted(key for key, value in rope.items() if isinstance(value, dict))
    if by_layer:
        raise ValueError(f"{path}: separate RoPE parameters for {by_layer} are not supported")
    if rope_type != "default":
        if "factor" not in rope:
            raise ValueError(f"{path}: {rope_type} RoPE scaling has no factor")
        number(path, rope, "factor")
    given = {**_REQUIRED, **rope}
    for key, value in {**_REQUIRED, **_REQUIRED_OF_TYPE[rope_type]}.items():
        if given.get(key) != value and (given.get(key) or value):
            raise ValueError(
                f"{path}: RoPE {key} is {given.get(key)!r}, only {value!r} is supported"
            )
