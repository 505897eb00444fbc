"""Reads the RoPE settings of config.json; refuses any that would change what is computed."""

from collections.abc import Mapping
from math import log, sqrt
from pathlib import Path
from typing import Any

from checkpoint_convert.families.description import Family
from checkpoint_convert.folder import boolean, integer, number
from checkpoint_convert.layer_types import FULL, WINDOWED

# Parameters that vLLM reads, with one supported value for every RoPE type.
_REQUIRED: dict[str, Any] = {"rope_dim": None, "use_fope": False}
_TYPES = ("default", "linear", "llama3", "longrope", "yarn")
_TRAINED_LENGTH = "original_max_position_embeddings"
# RoPE's keys at the top level: both forms of its parameters, and the base.
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")


def read_ropes(
    path: Path, config: Mapping[str, Any], family: Family
) -> tuple[float, dict[str, Any] | None, float | None]:
    """(base, scaling, base of windowed layers); the last is None if all layers share one RoPE.

    For two RoPEs, `rope_parameters` has an object for each kind of layer. The older `rope_scaling`
    and `rope_theta` are of layers without a window. See `read_rope`.
    """
    if family.rope.partial_factor == 0:  # no layer has RoPE
        return 10_000.0, None, None
    windows = family.windows
    if windows is None or windows.rope_theta is None:
        return *read_rope(path, config, family), None
    kinds = config.get("rope_parameters") or {}
    if not isinstance(kinds, dict) or not {*kinds} <= {FULL, WINDOWED}:
        raise ValueError(
            f"{path}: rope_parameters is {kinds!r}; it must have an object for {FULL} and one for "
            f"{WINDOWED}"
        )
    of_full, of_windowed = (kinds.get(kind) or {} for kind in (FULL, WINDOWED))
    if not isinstance(of_full, dict) or not isinstance(of_windowed, dict):
        raise ValueError(f"{path}: rope_parameters is {kinds!r}; it must have objects")
    older = config.get("rope_scaling") or {}
    if not isinstance(older, dict):
        raise ValueError(f"{path}: rope_scaling is {older!r}; it must be null or an object")
    bases = windows.rope_theta
    full = {"rope_theta": config.get("rope_theta", bases[0]), **of_full, **older}
    others = {key: value for key, value in config.items() if key not in _ROPE_KEYS}
    theta, scaling = read_rope(path, others | {"rope_parameters": full}, family)
    own = {"rope_theta": config.get(windows.rope_theta_key or "", bases[1]), **of_windowed}
    window_theta, window_scaling = read_rope(path, others | {"rope_parameters": own}, family)
    if window_scaling is not None:
        raise ValueError(
            f"{path}: RoPE scaling {window_scaling['rope_type']!r} of {WINDOWED} is not supported: "
            f"only {FULL} may be scaled"
        )
    is_same = scaling is None and window_theta == theta
    return theta, scaling, None if is_same else window_theta


def read_rope(
    path: Path, config: Mapping[str, Any], family: Family
) -> tuple[float, dict[str, Any] | None]:
    """The base of RoPE, and the `rope_type` and parameters of its scaling, or None without scaling.

    `config` holds the values of the file at `path`. Raises ValueError for unsupported settings.
    """
    rope, partial_rotary_factor = _parameters(path, config), rotated_part(path, config, family)
    required = {"partial_rotary_factor": partial_rotary_factor, **family.rope.required}
    _check(path, rope, _REQUIRED | required)
    theta = number(path, rope, "rope_theta")
    if rope["rope_type"] == "default":
        return theta, None
    if rope["rope_type"] not in family.rope.types:
        raise ValueError(
            f"{path}: RoPE scaling {rope['rope_type']!r} is not supported for "
            f"{family.model_type}; supported: {[*family.rope.types]}"
        )
    if rope["rope_type"] == "yarn":
        if partial_rotary_factor != 1.0:
            raise ValueError(
                f"{path}: yarn RoPE scaling is not supported for a model that rotates a part of "
                f"each head ({partial_rotary_factor:g}), as its attention factor would then scale "
                "that part alone: set rope_type to 'default'"
            )
        return theta, _yarn(path, config, rope, has_mla=family.has_mla)
    if rope["rope_type"] == "longrope":
        return theta, _longrope(path, config, rope, partial_rotary_factor)
    scaling = {"rope_type": rope["rope_type"], "factor": number(path, rope, "factor")}
    return theta, scaling | (_llama3(path, rope) if rope["rope_type"] == "llama3" else {})


def num_positions(path: Path, config: Mapping[str, Any]) -> int:
    """Supported context length: `max_position_embeddings`, or less (see Ministral 3)."""
    num, rope = integer(path, config, "max_position_embeddings"), _parameters(path, config)
    # `llama_4_scaling_beta` changes queries from the trained length on, in transformers alone.
    # Beyond it longrope has long factors: in transformers for the longer sequences, in vLLM for all
    # sequences of an engine with such a `max_model_len`.
    if rope["rope_type"] == "longrope" or rope.get("llama_4_scaling_beta"):
        return min(num, integer(path, rope, _TRAINED_LENGTH))
    return num


def rotated_part(path: Path, config: Mapping[str, Any], family: Family) -> float:
    """Read `ModelShape.partial_rotary_factor`."""
    if family.rope.partial_factor is not None:
        return family.rope.partial_factor
    key = "partial_rotary_factor"
    rope = {key: config.get(key, 1.0), **_parameters(path, config)}
    part, head_dim = number(path, rope, key), integer(path, config, "head_dim")
    if part > 1 or part * head_dim % 2:
        raise ValueError(
            f"{path}: {key} is {part:g}; it must be at most 1, and give an even number of the "
            f"{head_dim} elements of a head"
        )
    return part


def _parameters(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE parameters in the format of transformers 5, from that format or the older one."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.get(key) or {}
    if not isinstance(scaling, dict):
        raise ValueError(f"{path}: {key} is {scaling!r}; it must be null or an object")
    scaling = dict(scaling)
    rope_type = scaling.pop("rope_type", scaling.pop("type", "default"))
    # A value at the top level of config.json takes precedence in transformers and vLLM.
    if rope_type in ("llama3", "longrope", "yarn") and _TRAINED_LENGTH in config:
        scaling[_TRAINED_LENGTH] = config[_TRAINED_LENGTH]
    return {"rope_theta": config.get("rope_theta", 10000.0), **scaling, "rope_type": rope_type}


def _check(path: Path, rope: Mapping[str, Any], required: Mapping[str, Any]) -> None:
    """Raise ValueError for an unsupported type or value; `required` are values for every type."""
    rope_type = rope["rope_type"]
    if rope_type not in _TYPES:
        raise ValueError(
            f"{path}: RoPE scaling {rope_type!r} is not supported; supported: {[*_TYPES]}"
        )
    by_layer = sorted(key for key, value in rope.items() if isinstance(value, dict))
    if by_layer:
        raise ValueError(f"{path}: separate RoPE parameters for {by_layer} are not supported")
    if rope_type not in ("default", "longrope"):
        if "factor" not in rope:
            raise ValueError(f"{path}: {rope_type} RoPE scaling has no factor")
        number(path, rope, "factor")
    for key, value in required.items():
        given = rope.get(key, value)
        if given != value and (given or value):  # null, false and 0 are equal
            raise ValueError(f"{path}: RoPE {key} is {given!r}, only {value!r} is supported")


def _llama3(path: Path, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Further parameters of Llama 3's scaling, which slows long wavelengths by `factor`."""
    low, high = (number(path, rope, f"{end}_freq_factor") for end in ("low", "high"))
    if low >= high:  # between the two wavelengths, transformers and vLLM would differ
        raise ValueError(
            f"{path}: low_freq_factor({low:g}) must be less than high_freq_factor({high:g})"
        )
    length = integer(path, rope, _TRAINED_LENGTH)
    return {"low_freq_factor": low, "high_freq_factor": high, _TRAINED_LENGTH: length}


def _yarn(
    path: Path, config: Mapping[str, Any], rope: Mapping[str, Any], *, has_mla: bool
) -> dict[str, Any]:
    """Parameters of YaRN (arXiv 2309.00071), with the defaults of transformers and vLLM."""
    # Without a default: transformers and vLLM take `max_position_embeddings` for the trained
    # length, but that is the scaled one.
    factor, trained_length = number(path, rope, "factor"), integer(path, rope, _TRAINED_LENGTH)
    length = integer(path, config, "max_position_embeddings")
    # vLLM would read beyond its table of factor * trained_length positions.
    if length > factor * trained_length:
        raise ValueError(
            f"{path}: max_position_embeddings({length}) is more than factor({factor:g}) * "
            f"{_TRAINED_LENGTH}({trained_length}) of yarn RoPE scaling: set it to at most "
            f"{int(factor * trained_length)}"
        )
    given = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, **rope}
    return {
        "rope_type": "yarn",
        "factor": factor,
        _TRAINED_LENGTH: trained_length,
        "beta_fast": number(path, given, "beta_fast"),
        "beta_slow": number(path, given, "beta_slow"),
        "truncate": boolean(path, given, "truncate"),
        "attention_factor": (
            _latent_attention_factor(path, given, factor)
            if has_mla
            else _attention_factor(path, rope, factor)
        ),
    }


def _longrope(
    path: Path, config: Mapping[str, Any], rope: Mapping[str, Any], part: float
) -> dict[str, Any]:
    """Parameters of LongRoPE (arXiv 2402.13753) within the trained length: see `num_positions`."""
    trained_length = integer(path, rope, _TRAINED_LENGTH, minimum=2)
    ratio = integer(path, config, "max_position_embeddings") / trained_length
    # transformers reads the first two, vLLM the others.
    only = {"factor": ratio, "attention_factor": None, "short_mscale": None, "long_mscale": None}
    for key, supported in only.items():
        if rope.get(key) not in (None, supported):
            raise ValueError(
                f"{path}: RoPE {key} is {rope[key]!r}, only {supported!r} is supported"
            )
    pairs, factors = round(part * config["head_dim"]) // 2, rope.get("short_factor")
    if not isinstance(factors, list) or len(factors) != pairs:
        raise ValueError(
            f"{path}: RoPE short_factor is {factors!r}; it must be a list of {pairs} numbers, one "
            "for each pair of rotated elements"
        )
    each = {f"short_factor {pair}": factor for pair, factor in enumerate(factors)}
    growth = log(max(ratio, 1.0)) / log(trained_length)
    return {
        "rope_type": "longrope",
        "short_factor": [number(path, each, name) for name in each],
        "attention_factor": sqrt(1 + growth),
    }


def _attention_factor(path: Path, rope: Mapping[str, Any], factor: float) -> float:
    """Factor of queries and keys: the paper's sqrt(1 / t), 0.1 ln(factor) + 1."""
    if rope.get("attention_factor") is not None:
        return number(path, rope, "attention_factor")
    # No growth below 1, as in `get_mscale` of transformers.
    growth = 0.1 * log(max(factor, 1.0))
    if rope.get("mscale") and rope.get("mscale_all_dim"):  # either alone means nothing
        over, under = (number(path, rope, key) for key in ("mscale", "mscale_all_dim"))
        return (1 + over * growth) / (1 + under * growth)
    return 1 + growth


def _latent_attention_factor(path: Path, rope: Mapping[str, Any], factor: float) -> float:
    """Factor of queries and keys in latent attention: 0.1 mscale_all_dim ln(factor) + 1.

    It applies to both parts of a head. The rotated part has a further factor, which must be 1: the
    same formula with `mscale`, divided by the formula with `mscale_all_dim`.
    """
    over, under = rope.get("mscale"), rope.get("mscale_all_dim")
    if over is None or over != under:
        raise ValueError(
            f"{path}: RoPE mscale({over}) and mscale_all_dim({under}) must be equal numbers for "
            "latent attention"
        )
    # vLLM does not read these for latent attention.
    for key, supported in (("attention_factor", None), ("truncate", True)):
        if rope.get(key) != supported:
            raise ValueError(
                f"{path}: RoPE {key} is {rope.get(key)!r}, only {supported!r} is supported for "
                "latent attention"
            )
    return 1 + 0.1 * number(path, rope, "mscale_all_dim") * log(max(factor, 1.0))
