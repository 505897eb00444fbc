"""Reads config.json into a `ModelShape`; refuses settings that would change what is computed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint_convert.families import FAMILIES
from checkpoint_convert.families.description import Experts, Family
from checkpoint_convert.families.multimodal import MULTIMODAL
from checkpoint_convert.folder import boolean, even, integer, number, read_json, token_ids
from checkpoint_convert.formats.safetensors_file import NAMES, stored_names
from checkpoint_convert.layer_types import (
    read_blocks,
    read_indexer,
    read_linear,
    read_windows,
)
from checkpoint_convert.quantized.scheme import (
    MODELOPT_FILE,
    Mxfp4Scheme,
    Scheme,
    is_mxfp4,
    quantization_table,
    scheme_of,
)
from checkpoint_convert.rope import num_positions, read_ropes, rotated_part
from checkpoint_convert.shape import LatentShape, ModelShape, MoeShape, Stacks
from checkpoint_convert.text_tower import is_multimodal, text_config

# Keys with one supported value in every family, which is also the value of an absent key.
# transformers' configs of our families declare only a few of them; code shared by all models, in
# transformers or in an inference engine, reads the others.
_REQUIRED = {
    "hidden_act": "silu",
    "bias": False,
    "qkv_bias": False,
    "attention_dropout": 0.0,
    "is_causal": True,
    "attention_chunk_size": None,
    "rswa_window": None,
    "dual_chunk_attention_config": None,
    "num_kv_shared_layers": None,
    "rotary_pct": 1.0,
    "rotary_emb_fraction": 1.0,
    "logit_scale": 1.0,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "text_config": None,
    "per_layer_config": None,
    "fusion_config": None,
    "transformers_weights": None,  # names another file of weights
}


def read_shape(folder: str | Path) -> ModelShape:
    """Read the shape of the model in `folder` from config.json.

    Raises ValueError for a missing or broken file, an unsupported `model_type`, a missing key, and
    any key whose value would change what the model computes and is not supported.
    """
    whole = read_json(path := Path(folder) / "config.json")
    config = text_config(path, whole)
    model_type = config.get("model_type")
    if model_type not in list(FAMILIES):  # a list, as a JSON value may be unhashable
        raise ValueError(
            f"{path}: model_type {model_type!r} is not supported; supported: {sorted(FAMILIES)}, "
            f"and the text of {[*MULTIMODAL]}"
        )
    family = FAMILIES[model_type]
    values = _with_defaults(path, family, config)
    # First: it sets num_hidden_layers and rms_norm_eps, which the other readers need.
    block_types = read_blocks(path, values) if family.has_block_types else ()
    _check_supported(path, family, values)
    _scheme(path, whole)  # refuses an unsupported scheme
    window, windowed_layers = read_windows(path, values, family)
    rope_theta, rope_scaling, window_rope_theta = read_ropes(path, values, family)
    latent = _latent(path, values) if family.has_mla else None
    linear, linear_layers = read_linear(path, values, family, block_types)
    attention_bias = _switch(path, values, family.attention_bias)
    return ModelShape(
        family=family.model_type,
        num_layers=integer(path, values, "num_hidden_layers"),
        hidden_size=values["hidden_size"],
        num_attention_heads=values["num_attention_heads"],
        num_key_value_heads=_num_key_value_heads(path, values),
        head_dim=_head_dim(path, values, latent),
        intermediate_size=integer(path, values, "intermediate_size"),
        vocab_size=integer(path, values, "vocab_size"),
        tie_word_embeddings=boolean(path, values, "tie_word_embeddings"),
        attention_bias=attention_bias,
        has_output_bias=attention_bias and family.has_output_bias,
        qk_norm=_switch(path, values, family.norms.of_heads),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        rms_norm_eps=number(path, values, "rms_norm_eps"),
        max_position_embeddings=num_positions(path, values),
        eos_token_ids=_eos_token_ids(path, values),
        partial_rotary_factor=rotated_part(path, values, family),
        query_pre_attn_scalar=_number(path, values, family.query_scale),
        **_of_family(family),
        window=window,
        windowed_layers=windowed_layers,
        window_rope_theta=window_rope_theta if windowed_layers else None,
        moe=_moe(path, family, values) if not block_types or "moe" in block_types else None,
        latent=latent,
        indexer=read_indexer(path, values, family, latent),
        linear=linear,
        linear_layers=linear_layers,
        block_types=block_types,
        num_mtp_layers=_count(path, values, family.mtp.num_layers),
    )


def _of_family(family: Family) -> dict[str, Any]:
    """Fields of a shape that all models of a family share."""
    return {
        "has_pre_norms": family.norms.has_pre,
        "has_post_norms": family.norms.has_post,
        "norms_all_heads": family.norms.over_all_heads,
        "zero_centered_norms": family.norms.is_zero_centered,
        "scales_embeddings": family.scales_embeddings,
        "has_linear_biases": family.has_linear_biases,
        "has_sinks": family.has_sinks,
        "has_output_gate": family.has_output_gate,
        "activation": family.activation,
    }


def _head_dim(path: Path, values: Mapping[str, Any], latent: LatentShape | None) -> int:
    if latent is None:
        return even(path, values, "head_dim")
    return integer(path, values, "qk_nope_head_dim") + latent.rotary_dim


def _num_key_value_heads(path: Path, values: Mapping[str, Any]) -> int:
    number, num_heads = integer(path, values, "num_key_value_heads"), values["num_attention_heads"]
    if num_heads % number:
        raise ValueError(
            f"{path}: num_key_value_heads({number}) must divide num_attention_heads({num_heads})"
        )
    return number


def has_other_towers(folder: Path) -> bool:
    """Whether config.json describes a multimodal model; False without config.json."""
    path = folder / "config.json"
    return path.is_file() and is_multimodal(read_json(path))


def may_have_linear_attention(folder: Path) -> bool:
    """Whether config.json names a family with linear attention; False without config.json."""
    path = folder / "config.json"
    if not path.is_file():
        return False
    model_type = text_config(path, read_json(path)).get("model_type")
    return (
        isinstance(model_type, str) and model_type in FAMILIES and bool(FAMILIES[model_type].linear)
    )


def read_scheme(folder: Path) -> Scheme | Mxfp4Scheme | None:
    """Quantisation scheme of the weights in `folder`; None without quantisation or config.json.

    Raises ValueError for an unsupported scheme.
    """
    path = folder / "config.json"
    return _scheme(path, read_json(path)) if path.is_file() else None


def _scheme(path: Path, config: Mapping[str, Any]) -> Scheme | Mxfp4Scheme | None:
    table, own = quantization_table(config), path.with_name(MODELOPT_FILE)
    if table is None and own.is_file():
        path, table = own, {**read_json(own), "quant_method": "modelopt"}
    if table is None:
        return None
    if not isinstance(table, dict):
        raise ValueError(f"{path}: quantization_config must be an object")
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if dtype not in list(NAMES):  # a list, as a JSON value may be unhashable
        raise ValueError(f"{path}: dtype is {dtype!r}, supported: {sorted(NAMES)}")
    if is_mxfp4(config):
        return Mxfp4Scheme(NAMES[dtype])
    return scheme_of(path, table, NAMES[dtype])


def _with_defaults(path: Path, family: Family, config: dict[str, Any]) -> dict[str, Any]:
    """The values of config.json as transformers' config class would have them."""
    values = {**family.defaults, **config}
    if family.experts is not None:  # transformers reads both names, and writes the second
        for name in ("num_experts", "num_local_experts"):
            if name in config:
                values[family.experts.num_experts] = config[name]
    if values.get("rope_parameters") is None:  # as transformers reads it
        values["rope_parameters"] = family.defaults.get("rope_parameters")
    # transformers and vLLM read null as absent, except where absent is not 1.
    if family.rope.partial_factor == 1.0 and values.get("partial_rotary_factor") is None:
        values.pop("partial_rotary_factor", None)
    num_heads = integer(path, values, "num_attention_heads")
    hidden_size = integer(path, values, "hidden_size")
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = num_heads
    if "head_dim" in values and values["head_dim"] is None:
        values["head_dim"] = hidden_size // num_heads
    return values


def _latent(path: Path, values: Mapping[str, Any]) -> LatentShape:
    num_heads, num_kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    if num_heads != num_kv_heads:
        raise ValueError(
            f"{path}: num_key_value_heads({num_kv_heads}) must be num_attention_heads({num_heads}),"
            " as latent attention has keys and values for every head"
        )
    rotary_dim = even(path, values, "qk_rope_head_dim")
    head_dim = values.get("head_dim", rotary_dim)  # transformers gives its RoPE this size
    if head_dim != rotary_dim:
        raise ValueError(
            f"{path}: head_dim is {head_dim}; in a model with latent attention it must be "
            f"qk_rope_head_dim({rotary_dim}), or absent"
        )
    has_query_rank = values["q_lora_rank"] is not None
    return LatentShape(
        query_rank=integer(path, values, "q_lora_rank") if has_query_rank else None,
        rank=integer(path, values, "kv_lora_rank"),
        rotary_dim=rotary_dim,
        value_dim=integer(path, values, "v_head_dim"),
    )


def _groups(path: Path, values: Mapping[str, Any], num_experts: int) -> tuple[int, int]:
    """(groups of experts, groups that a token's experts may come from); (1, 1) without groups."""
    per_token = values["num_experts_per_tok"]
    num_groups, chosen = (integer(path, values, key) for key in ("n_group", "topk_group"))
    if num_groups == chosen == 1:
        return 1, 1
    if num_experts % num_groups or num_experts == num_groups:
        raise ValueError(
            f"{path}: n_group({num_groups}) must divide n_routed_experts({num_experts}) into "
            "groups of at least 2"
        )
    # DeepSeek-V3 scores a group by the sum of its two largest scores, Megatron-Core's
    # group_limited_topk by the sum of its num_experts_per_tok / topk_group largest: the quotient
    # must be 2.
    if chosen > num_groups or per_token != 2 * chosen:
        raise ValueError(
            f"{path}: topk_group({chosen}) must be at most n_group({num_groups}), and half of "
            f"num_experts_per_tok({per_token}); without groups, topk_group and n_group are 1"
        )
    return num_groups, chosen


def _moe(path: Path, family: Family, values: Mapping[str, Any]) -> MoeShape | None:
    keys = family.experts
    if keys is None:
        return None
    num_experts = integer(path, values, keys.num_experts)
    experts_per_token = integer(path, values, "num_experts_per_tok")
    if experts_per_token > num_experts:
        raise ValueError(
            f"{path}: num_experts_per_tok({experts_per_token}) is more than "
            f"{keys.num_experts}({num_experts})"
        )
    normalize_topk = keys.normalize_topk is None or boolean(path, values, keys.normalize_topk)
    # Megatron-Core's topk_routing_with_score_function divides by the sum only if topk > 1.
    if (keys.score_function == "sigmoid" or normalize_topk) and experts_per_token == 1:
        raise ValueError(
            f"{path}: num_experts_per_tok is 1; it must be at least 2, as Megatron-Core neither "
            "scales the weight of a single expert nor makes it 1"
        )
    size = integer(path, values, keys.intermediate_size)
    num_groups, groups_per_token = _groups(path, values, num_experts) if keys.has_groups else (1, 1)
    return MoeShape(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        intermediate_size=size,
        normalize_topk=normalize_topk,
        score_function=keys.score_function,
        num_groups=num_groups,
        groups_per_token=groups_per_token,
        weight_scale=1.0 if keys.weight_scale is None else number(path, values, keys.weight_scale),
        # Families have one of the two keys, or neither.
        shared_intermediate_size=(
            _count(path, values, keys.shared_size, minimum=1)
            or size * _count(path, values, keys.num_shared)
        ),
        has_shared_gate=keys.has_shared_gate,
        dense_layers=_dense_layers(path, values, keys),
        **_stacks(path.parent, keys),
    )


def _stacks(folder: Path, keys: Experts) -> dict[str, Stacks | None]:
    """`MoeShape.stacks` and `mtp_stacks`: None where the files in `folder` store experts one by
    one, else the family's."""
    # Qwen3.5 is also published with stacked experts in layers, and MTP experts one by one.
    apart = [name for name in stored_names(folder) if ".experts.0." in name and keys.may_be_apart]
    are_apart = {name.startswith("mtp.") for name in apart}
    of_tower = keys.tower_stacks if has_other_towers(folder) else None
    return {
        field: None if is_of_mtp in are_apart else of_tower or keys.stacks
        for field, is_of_mtp in (("stacks", False), ("mtp_stacks", True))
    }


def _switch(path: Path, values: Mapping[str, Any], key: bool | str) -> bool:
    return boolean(path, values, key) if isinstance(key, str) else key


def _number(path: Path, values: Mapping[str, Any], key: str | None) -> float | None:
    return None if key is None else number(path, values, key)


def _count(path: Path, values: Mapping[str, Any], key: str | None, minimum: int = 0) -> int:
    return 0 if key is None else integer(path, values, key, minimum)


def _dense_layers(path: Path, values: Mapping[str, Any], keys: Experts) -> tuple[int, ...]:
    """Layers with a dense MLP in place of experts."""
    layers = range(integer(path, values, "num_hidden_layers"))
    first, every = _count(path, values, keys.num_dense_layers), _count(path, values, keys.every, 1)
    given = (keys.dense_layers and values[keys.dense_layers]) or []
    if not isinstance(given, list):
        raise ValueError(f"{path}: {keys.dense_layers} is {given!r}; it must be a list of layers")
    dense = tuple(i for i in layers if i < first or i in given or (every and (i + 1) % every))
    names = (keys.num_dense_layers, keys.dense_layers, keys.every)
    said = " and ".join(f"{name}({values[name]})" for name in names if name)
    if len(dense) == len(layers):
        raise ValueError(
            f"{path}: {said} leaves none of num_hidden_layers({len(layers)}) with experts"
        )
    kinds = values.get("mlp_layer_types")
    if kinds is not None and kinds != ["dense" if i in dense else "sparse" for i in layers]:
        raise ValueError(
            f"{path}: of num_hidden_layers({len(layers)}), mlp_layer_types must have 'dense' for "
            f"{[*dense]}, by {said}, and 'sparse' for the others"
        )
    return dense


def _check_supported(path: Path, family: Family, config: Mapping[str, Any]) -> None:
    factor = family.rope.partial_factor
    # Without RoPE nobody reads it; where config.json says it, any value is supported.
    rotary = {"partial_rotary_factor": factor} if factor else {}
    refused = [
        f"{key} is {config[key]!r}, only {supported!r} is supported"
        for key, supported in {**_REQUIRED, **rotary, **family.required}.items()
        # null, false, 0 and an empty list all mean that a feature is off
        if key in config and config[key] != supported and (config[key] or supported)
    ]
    refused += [
        f"{key} is {config.get(key)!r}, only {supported!r} is supported"
        for key, supported in family.explicit.items()
        if config.get(key) != supported
    ]
    if family.rope.size is not None:
        assert factor is not None, "a size is of a fixed part"
        size, given = integer(path, config, "head_dim"), config.get(family.rope.size)
        if given != (own := round(factor * size)):
            key = f"with head_dim {size}, {family.rope.size}"
            refused.append(f"{key} is {given!r}, only {own} is supported")
    alternates = family.experts is not None and family.experts.stacks == "alternating"
    if is_mxfp4(config) and not alternates:
        refused.append(
            "weights are quantised with quant_method 'mxfp4', which only stacks of experts may have"
        )
    # `layer_types.py` checks the kinds of these families' layers.
    has_kinds = family.windows or family.linear or family.indexer_pairs
    layers = [] if has_kinds else config.get("layer_types") or []
    if not isinstance(layers, list):
        refused.append(f"layer_types is {layers!r}, only a list of 'full_attention' is supported")
    elif others := sorted({str(kind) for kind in layers} - {"full_attention"}):
        refused.append(f"layer_types contains {others}, only 'full_attention' is supported")
    if refused:
        raise ValueError(
            f"{path} has settings that are not supported for {family.model_type}: "
            + "; ".join(refused)
        )


def _eos_token_ids(path: Path, values: Mapping[str, Any]) -> tuple[int, ...]:
    generation = path.with_name("generation_config.json")
    if generation.is_file():
        generation_values = read_json(generation)
        # Goes before config.json: chat models keep this file up to date.
        if generation_values.get("eos_token_id") is not None:
            return token_ids(generation, generation_values, "eos_token_id")
    return token_ids(path, values, "eos_token_id")
