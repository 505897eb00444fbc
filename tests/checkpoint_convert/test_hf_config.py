"""config.json -> ModelShape: transformers' own keys, older formats, and refused keys."""

import inspect
import json
import re
from copy import deepcopy
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from checkpoint_convert import LatentShape, ModelShape, MoeShape, read_shape
from checkpoint_convert.families import FAMILIES
from checkpoint_convert.shape import IndexerShape, LinearShape
from helpers.models.published import PUBLISHED_MODELS
from helpers.models.tiny import (
    CONFIGS,
    HYBRIDS,
    INDEXED,
    LATENTS,
    NEVER_TIED,
    OWN_FIELDS,
    no_dropout,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 250,
}
GPT_OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
ROUTER_OF_MINIMAX = {"scoring_func": "sigmoid", "use_routing_bias": True}
LATENT = {"num_key_value_heads": 4, "first_k_dense_replace": 1}
OF_FAMILY = {
    family: LLAMA | {"model_type": family} | own
    for family, own in {
        "llama": {},
        "deepseek_v3": LATENT | ROUTER,
        "deepseek_v32": LATENT | ROUTER,
        "glm_moe_dsa": LATENT | ROUTER | {"indexer_rope_interleave": True},
        "glm4_moe": {"head_dim": 16, "num_key_value_heads": 2},
        "glm4_moe_lite": LATENT,
        "gpt_oss": {"num_key_value_heads": 4},
        "minimax_m2": ROUTER_OF_MINIMAX | {"num_key_value_heads": 4, "rotary_dim": 64},
        "mixtral": {"num_key_value_heads": 2},
        "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention"]},
        "olmo3": {},
        "phi3": {},
        "qwen2": {"num_key_value_heads": 2, "sliding_window": None},
        "qwen3_moe": {},
        "qwen3_next": {"num_key_value_heads": 2, "full_attention_interval": 2},
    }.items()
}
"""Keys of a small model, by family."""
QWEN3_5 = ("qwen3_5_text", "qwen3_5_moe_text")
STACKS = {"gpt_oss": "alternating", "qwen3_5_moe_text": "joined"}
FULL, WINDOWED = "full_attention", "sliding_attention"
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def shape_of(folder, config, generation_config=None):
    """The shape of a Llama with these keys changed."""
    (folder / "config.json").write_text(json.dumps(LLAMA | config))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return read_shape(folder)


def tiny_config(family):
    tiny = {
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "intermediate_size": 96,
        "vocab_size": 250,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "tie_word_embeddings": family not in NEVER_TIED,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "eos_token_id": [7, 8],
    }
    if family in LATENTS:  # where heads are 16 + 8 wide
        tiny |= {"num_key_value_heads": 4, "head_dim": 8}
    if family.startswith("qwen") and family not in HYBRIDS:
        tiny |= {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}
    if family == "minimax_m2":
        tiny["rotary_dim"] = 12
    own = no_dropout(family) | OWN_FIELDS.get(family, {})
    return CONFIGS[family](**deepcopy(tiny | own))  # the class changes its arguments


def saved_config(family):
    return json.loads(tiny_config(family).to_json_string())


NO_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.0}
MULTI_TOKEN = (*LATENTS, "glm4_moe")
"""Families that may be published with MTP layers."""
SIGMOIDS = (*MULTI_TOKEN, "minimax_m2", "nemotron_h")
OLMO = {"qk_norm": True, "has_pre_norms": False, "has_post_norms": True, "norms_all_heads": True}
HYBRID = {"qk_norm": True, "zero_centered_norms": True, "has_output_gate": True}
GEMMA = {"has_post_norms": True, "zero_centered_norms": True, "scales_embeddings": True}
FLAGS = {
    "gemma3_text": GEMMA | {"qk_norm": True},
    "gpt_oss": {
        "has_output_bias": True,
        "has_linear_biases": True,
        "has_sinks": True,
        "activation": "swigluoai",
    },
    "minimax_m2": {"qk_norm": True, "norms_all_heads": True},
    "olmo2": OLMO,
    "olmo3": OLMO,
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    **dict.fromkeys(HYBRIDS, HYBRID),
}
"""Facts of a family that no key of its config states."""
SAME_NAMES = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size"),
    *("tie_word_embeddings", "max_position_embeddings"),
)


def shape_by_transformers(config):
    """The shape of the model that transformers builds from its `config`."""
    family, eos = config.model_type, config.eos_token_id
    rope = dict(config.rope_parameters) if family != "nemotron_h" else NO_ROPE.copy()
    blocks, latent = blocks_by_transformers(config), latent_by_transformers(config)
    linear, linear_layers = linear_by_transformers(config)
    window, windowed = windows_by_transformers(config)
    own, rope = rope.get("sliding_attention", rope), rope.get("full_attention", rope)
    window_theta = own["rope_theta"] if windowed and own != rope else None
    theta, factor = rope.pop("rope_theta"), rope.pop("partial_rotary_factor", 1.0)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    activations = ("hidden_activation", "mlp_hidden_act", "hidden_act")
    said = {
        "attention_bias": getattr(config, "attention_bias", False),
        "qk_norm": getattr(config, "use_qk_norm", False),
        "query_pre_attn_scalar": getattr(config, "query_pre_attn_scalar", None),
        "activation": next(x for n in activations if (x := getattr(config, n, None))),
        # An attribute that not every version of transformers knows.
        "num_mtp_layers": getattr(
            config,
            "mtp_num_hidden_layers" if family in QWEN3_5 else "num_nextn_predict_layers",
            int(family in (*MULTI_TOKEN, "qwen3_next")),
        ),
        # A mixture may have no dense layer.
        "intermediate_size": getattr(config, "intermediate_size", 512),
        "rms_norm_eps": getattr(config, "layer_norm_epsilon", None) or config.rms_norm_eps,
    }
    return ModelShape(
        family=family,
        num_layers=config.num_hidden_layers,
        head_dim=config.qk_nope_head_dim + config.qk_rope_head_dim if latent else head_dim,
        rope_theta=theta,
        rope_scaling=None
        if rope["rope_type"] == "default"
        else rope | yarn_by_transformers(config),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        linear=linear,
        linear_layers=linear_layers,
        block_types=blocks,
        window=window,
        windowed_layers=windowed,
        window_rope_theta=window_theta,
        partial_rotary_factor=factor,
        moe=moe_by_transformers(config) if not blocks or "moe" in blocks else None,
        latent=latent,
        indexer=indexer_by_transformers(config),
        **{name: getattr(config, name) for name in SAME_NAMES},
        **said | FLAGS.get(family, {}),
    )


def moe_by_transformers(config):
    if not hasattr(config, "num_experts_per_tok"):
        return None
    size = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    shared = getattr(config, "n_shared_experts", 0) * size
    shared = getattr(config, "moe_shared_expert_intermediate_size", shared)
    return MoeShape(
        num_experts=getattr(config, "num_local_experts", None) or config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        intermediate_size=size,
        normalize_topk=getattr(config, "norm_topk_prob", True),
        score_function="sigmoid" if config.model_type in SIGMOIDS else "softmax",
        num_groups=getattr(config, "n_group", 1),
        groups_per_token=getattr(config, "topk_group", 1),
        weight_scale=getattr(config, "routed_scaling_factor", 1.0),
        shared_intermediate_size=getattr(config, "shared_expert_intermediate_size", shared),
        has_shared_gate=config.model_type in HYBRIDS,
        dense_layers=dense_by_transformers(config),
        **dict.fromkeys(("stacks", "mtp_stacks"), STACKS.get(config.model_type)),
    )


def dense_by_transformers(config):
    """Layers without experts."""
    if config.model_type != "qwen3_moe":
        return tuple(range(getattr(config, "first_k_dense_replace", 0)))
    every, given = config.decoder_sparse_step, config.mlp_only_layers
    return tuple(i for i in range(config.num_hidden_layers) if i in given or (i + 1) % every)


def latent_by_transformers(config):
    if config.model_type not in LATENTS:
        return None
    return LatentShape(
        query_rank=config.q_lora_rank,
        rank=config.kv_lora_rank,
        rotary_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
    )


def indexer_by_transformers(config):
    if config.model_type not in INDEXED:
        return None
    return IndexerShape(
        topk=config.index_topk,
        num_heads=config.index_n_heads,
        head_dim=config.index_head_dim,
        has_neighbouring_pairs=config.model_type == "glm_moe_dsa",
    )


BLOCKS = {"linear_attention": "linear", "full_attention": "attention", "mlp": "mlp", "moe": "moe"}


def blocks_by_transformers(config):
    """The kind of each layer, in models with a single module per layer."""
    return tuple(BLOCKS[kind] for kind in getattr(config, "layers_block_type", ()))


def linear_by_transformers(config):
    """Linear attention, and its layers."""
    if blocks := blocks_by_transformers(config):
        shape = LinearShape(
            is_mamba=True,
            num_key_heads=config.n_groups,
            num_value_heads=config.mamba_num_heads,
            key_dim=config.ssm_state_size,
            value_dim=config.mamba_head_dim,
            kernel_size=config.conv_kernel,
        )
        return shape, tuple(i for i, kind in enumerate(blocks) if kind == "linear")
    if config.model_type not in HYBRIDS:
        return None, ()
    shape = LinearShape(
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        kernel_size=config.linear_conv_kernel_dim,
    )
    return shape, tuple(i for i, kind in enumerate(config.layer_types) if kind.startswith("linear"))


def yarn_by_transformers(config):
    """Properties of a family's YaRN that its config does not state."""
    if config.model_type != "gpt_oss":
        return {}
    _, factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    return {"attention_factor": factor}


def windows_by_transformers(config):
    """The window and its layers: those of a kind, or all."""
    window = getattr(config, "sliding_window", None)
    if not window or "sliding_window" not in modeling_source(config):
        return None, ()
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    layers = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    return (window, layers) if layers else (None, ())


# Required keys: without them transformers assumes values that we refuse.
MUST_SAY = {
    "deepseek_v3": ROUTER | {"num_attention_heads": 128, "num_hidden_layers": 4},
    "deepseek_v32": ROUTER | {"num_attention_heads": 128, "num_hidden_layers": 4},
    "glm_moe_dsa": ROUTER
    | {"num_attention_heads": 64, "num_hidden_layers": 4, "indexer_rope_interleave": True},
    **{family: {"num_hidden_layers": 4} for family in HYBRIDS},
    "glm4_moe": {"head_dim": 2},
    "glm4_moe_lite": {"num_attention_heads": 20, "first_k_dense_replace": 1},
    "minimax_m2": ROUTER_OF_MINIMAX | {"rotary_dim": 64},
    "ministral3": OWN_FIELDS["ministral3"],
    "nemotron_h": {"layers_block_type": [*BLOCKS]},
}


OF_ROPE = [
    {"rope_theta": 5e5},
    {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 5e5}},
    {"rope_parameters": LINEAR_ROPE, "rope_theta": 5e5},
    {"rope_parameters": LINEAR_ROPE | {"rope_theta": 1e6}, "rope_theta": 5e5},
    {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": LINEAR_ROPE},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_scaling": LINEAR_ROPE | {"type": "yarn"}},
    {"rope_scaling": LLAMA3_ROPE},
    {"rope_scaling": LLAMA3_ROPE, "original_max_position_embeddings": 4096},
    {"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 2, "high_freq_factor": 8.0}},
    {
        "rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 4096},
        "original_max_position_embeddings": 8192,
    },
    {"rope_scaling": LINEAR_ROPE, "original_max_position_embeddings": 4096},
    {"rope_scaling": None},
    {"partial_rotary_factor": None},
]
OF_WINDOWS = [
    {"model_type": "mistral"},
    {"model_type": "mixtral", "sliding_window": 100},
    {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3},
    {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 28},
    {"model_type": "qwen3", "use_sliding_window": True, "layer_types": [WINDOWED, FULL] * 4},
    {"model_type": "qwen3_moe", "use_sliding_window": True, "max_window_layers": 3},
    {"model_type": "olmo3"},
    {"model_type": "olmo3", "sliding_window": 16, "layer_types": [FULL] * 8},
    {"model_type": "olmo3", "rope_theta": 1e4},
    {"model_type": "olmo3", "rope_scaling": LINEAR_ROPE},
    {"model_type": "olmo3", "rope_parameters": {FULL: LINEAR_ROPE}, "rope_theta": 1e6},
    {"model_type": "olmo3", "rope_parameters": {WINDOWED: {"rope_theta": 1e3}}},
    {"model_type": "gemma3_text"},
    {"model_type": "gemma3_text", "sliding_window_pattern": 2},
    {"model_type": "gemma3_text", "rope_local_base_freq": 5e3, "rope_scaling": LINEAR_ROPE},
]
# Published with YaRN or LongRoPE; see test_rope.py.
WITH_FACTORS = (
    *("DeepSeek-V3", "DeepSeek-V3.2", "Kimi-K2", "Ministral-3-8B", "OLMo-3-7B"),
    *("Phi-4-mini", "gpt-oss-20b", "gpt-oss-120b"),
)
READ = {
    **{f"{family} as saved": saved_config(family) for family in CONFIGS},
    **{
        f"{family} with absent keys": LLAMA
        | {"model_type": family, "num_attention_heads": 32}
        | no_dropout(family)
        | MUST_SAY.get(family, {})
        for family in CONFIGS
    },
    **{
        name: config
        for name, config in PUBLISHED_MODELS.items()
        if "text_config" not in config and name not in WITH_FACTORS
    },
    **{str(rope): LLAMA | rope for rope in OF_ROPE},
    **{
        str(config): LLAMA | config | {"num_hidden_layers": 8, "num_attention_heads": 32}
        for config in OF_WINDOWS
    },
}


@pytest.mark.parametrize("case", READ)
def test_read_shape_agrees_with_transformers(tmp_path, case):
    shape = shape_of(tmp_path, READ[case])
    config = CONFIGS[shape.family].from_pretrained(tmp_path)
    if READ[case]["model_type"] == "llama":
        config.standardize_rope_params()  # as the model does itself
        config.rope_parameters.pop("type", None)
    assert shape == shape_by_transformers(config)


# Keys that transformers or vLLM read and that cannot change a forward pass, grouped by purpose.
HARMLESS_FOR = {
    "names": "_name_or_path architectures dtype transformers_version",
    "tokens": "bos_token_id pad_token_id sep_token_id unpadded_vocab_size",
    "new weights": "init_std initializer_factor initializer_range",
    "a loss of transformers' own": "problem_type router_aux_loss_coef",
    "results": "output_attentions output_hidden_states output_router_logits return_dict use_cache",
    "other heads": "classifier_dropout hidden_dropout id2label label2id token_classification_bias",
    "how it runs": "compile_config distributed_config gradient_checkpointing pretraining_tp",
    "draft models": "chain_hidden_post_norm logits_mup_width_multiplier target_layer_count",
    "multi-token prediction": "first_k_dense_replace mlp_layer_types mtp_hidden_states_first "
    "mtp_layer_types mtp_mlp_layer_types mtp_per_layer_config num_mtp_layers",
    "other families": "chunk_size_feed_forward number_of_conv_states",
    # transformers saves their consequence as `layer_types`.
    "layer types": "max_window_layers sliding_window_pattern _sliding_window_pattern",
}
HARMLESS = set(" ".join(HARMLESS_FOR.values()).split())
# The sum of both parts of a head, as transformers writes it; vLLM's precision of the scores of
# experts; and details of index_topk.
OF_LATENTS = {"qk_head_dim", "moe_router_dtype", "index_topk_freq", "index_topk_pattern"}
OF_LATENTS |= {"index_skip_topk_offset", "indexer_rope_interleave"}
# The same files also have vision towers and models with experts.
OF_QWEN3_5 = {
    *("deepstack_visual_indexes", "depth", "image_token_id", "in_channels", "num_heads"),
    *("num_position_embeddings", "out_hidden_size", "patch_size", "spatial_merge_size"),
    *("temporal_patch_size", "video_token_id", "vision_config"),
}
OF_EXPERTS = {"decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "num_experts"}
HARMLESS_IN = {
    "gemma3_text": {"get_text_config", "image_token_id", "mm_tokens_per_image", "vision_config"},
    # vLLM runs this family's mixture by DeepSeek's file; only DeepSeek's mixture reads these.
    "glm4_moe_lite": set(ROUTER),
    "minimax_m2": {"max_model_len"},  # vLLM writes it
    # Initialisation, kernels, vLLM's dtype of states (set by our arguments), RoPE, which no layer
    # has, and consequences of `layers_block_type`.
    "nemotron_h": {
        *("time_step_floor", "time_step_limit", "time_step_max", "time_step_min"),
        *("chunk_size", "expand", "rescale_prenorm_residual", "use_mamba_kernels"),
        *("mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "num_logits_to_keep"),
        *("mtp_layers_block_type", "num_hidden_layers", "rope_parameters"),
        *("get_nemotron_h_config_for_layer", "get_text_config", "rms_norm_eps"),
    },
    "phi3": {"original_max_position_embeddings"},  # of LongRoPE, which the config does not have
    "qwen3_5_text": OF_QWEN3_5 | OF_EXPERTS,
    "qwen3_5_moe_text": OF_QWEN3_5,
}
# Values other than `tiny_config`'s, for keys that `other_value` cannot change.
OTHER_VALUES = {
    "indexer_types": ["full", "full", "shared"],
    "index_topk_freq": 2,
    "index_topk_pattern": "FFS",
    "attn_output_gate": False,
    "block_configs": [{}],
    "decoder_sparse_step": 2,
    "eos_token_id": 3,
    "head_dim": 32,
    "hidden_act": "gelu",
    "hidden_activation": "gelu",
    "is_causal": False,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "logit_scale": 0.5,
    "mlp_only_layers": [1],
    "layers_block_type": ["linear_attention", "full_attention", "moe"],
    "mamba_hidden_act": "gelu",
    "mlp_hidden_act": "silu",
    "model_type": "gemma",
    "moe_layer_freq": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10.0},
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
}


def other_value(name, value):
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    return not value if isinstance(value, bool) else (value or 0) + 1


# Modules of transformers that all models share and that read optional keys.
SHARED_MODULES = (
    "cache_utils",
    "configuration_utils",
    "masking_utils",
    "modeling_layers",
    "modeling_rope_utils",
    "modeling_utils",
)
# Further files of vLLM's model of a family, besides the file in its registry.
VLLM_FILES = {
    **dict.fromkeys(INDEXED, ("deepseek_v2",)),
    "glm4_moe_lite": ("glm4_moe", "deepseek_v2"),
    **dict.fromkeys(("mistral", "ministral3", "phi3"), ("llama",)),
    **dict.fromkeys(QWEN3_5, ("qwen3_next",)),
}


def optional_keys(source):
    """Optional keys: names that code reads from a config by getattr or hasattr."""
    return set(re.findall(r'attr\(\s*(?:\w+\.)*\w*config,\s*"([a-z]\w*)"', source))


def modeling_source(config):
    """Source of the model's module in transformers."""
    name = type(config).__module__.replace("configuration", "modeling")
    return inspect.getsource(import_module(name))


def keys_read(config):
    """Keys in a saved config, and keys that transformers and vLLM read from it."""
    read = re.findall(r'config(?:, "|\.)([a-z]\w+)', modeling_source(config))
    sources = [Path(transformers.__file__).with_name(f"{name}.py") for name in SHARED_MODULES]
    # Find vLLM's files without importing it, which works on any device.
    models = Path(find_spec("vllm").origin).with_name("model_executor") / "models"
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    entry = rf'"{architecture}": \(\s*"(\w+)"'
    named = set(re.findall(entry, (models / "registry.py").read_text()))
    files = {*named, *VLLM_FILES.get(config.model_type, ())}
    assert files, f"vLLM's registry has no {architecture}: name its files in VLLM_FILES"
    # vLLM runs models without a file of its own on transformers' code.
    sources += [models / f"{name}.py" for name in files - {"transformers"}]
    optional = set().union(*(optional_keys(path.read_text()) for path in sources))
    names = {field.name for field in fields(config)} | set(config.to_dict()) | set(read) | optional
    return names - set(config.attribute_map)  # these are aliases


@pytest.mark.parametrize("family", CONFIGS)
def test_read_shape_ignores_only_harmless_keys(tmp_path, family):
    names, saved = keys_read(tiny_config(family)), saved_config(family)
    harmless = HARMLESS | HARMLESS_IN.get(family, set())
    harmless -= {"first_k_dense_replace"} if family in MULTI_TOKEN else set()
    harmless |= OF_LATENTS if family in LATENTS else set()
    harmless -= {"index_topk_freq", "index_topk_pattern"} if family in INDEXED else set()
    shape = shape_of(tmp_path, saved)
    ignored = []
    for name in sorted(names - harmless):
        try:
            if shape_of(tmp_path, saved | {name: other_value(name, saved.get(name))}) == shape:
                ignored.append(name)
        except ValueError as error:
            assert name in str(error), f"{name}: {error}"
    assert not ignored, f"do they change what a {family} computes? {ignored}"


def test_read_shape_without_query_latents(tmp_path):
    config = OF_FAMILY["deepseek_v3"] | {
        "q_lora_rank": None,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
    }
    shape = shape_of(tmp_path, config)
    assert shape.latent == LatentShape(query_rank=None, rank=512, rotary_dim=8, value_dim=128)
    assert (shape.head_dim, shape.rotary_dim, shape.value_dim) == (32, 8, 128)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_read_shape_takes_head_dim_for_the_rotated_part(tmp_path, family):
    config = OF_FAMILY[family]
    shape = shape_of(tmp_path, config | {"head_dim": 64})
    assert (shape.head_dim - shape.rotary_dim, shape.rotary_dim) in ((128, 64), (192, 64))
    for head_dim, found in ((128, 128), (None, 16)):  # transformers divides the hidden size by 4
        with pytest.raises(ValueError, match=rf"head_dim is {found}; .*qk_rope_head_dim\(64\)"):
            shape_of(tmp_path, config | {"head_dim": head_dim})


def test_read_shape_of_experts_without_groups(tmp_path):
    ungrouped = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "n_routed_experts": 63}
    moe = shape_of(tmp_path, OF_FAMILY["deepseek_v3"] | ungrouped).moe
    assert (moe.num_groups, moe.groups_per_token, moe.experts_per_token) == (1, 1, 6)


@pytest.mark.parametrize("spelling", ["num_experts", "num_local_experts"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_read_shape_knows_both_names_of_the_experts(tmp_path, family, spelling):
    assert shape_of(tmp_path, OF_FAMILY[family] | {spelling: 16}).moe.num_experts == 16


@pytest.mark.parametrize("rope", [LINEAR_ROPE, LLAMA3_ROPE], ids=["linear", "llama3"])
def test_read_shape_drops_idle_rope_parameters(tmp_path, rope):
    idle = {"partial_rotary_factor": 1.0, "attention_factor": None, "use_fope": False}
    if rope is LINEAR_ROPE:
        idle["original_max_position_embeddings"] = 4096
    assert shape_of(tmp_path, {"rope_scaling": rope | idle}).rope_scaling == rope


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize("family", [name for name in CONFIGS if no_dropout(name)])
def test_read_shape_refuses_dropout(tmp_path, family):
    refused = "; ".join(rf"{key} is \S+, only 0\.0 is supported" for key in no_dropout(family))
    with pytest.raises(ValueError, match=refused):
        shape_of(tmp_path, {"model_type": family})


@pytest.mark.parametrize("family", ["gpt_oss", "ministral3"])
def test_read_shape_of_null_has_the_familys_scaling(tmp_path, family):
    sizes = {"model_type": family, "num_attention_heads": 32, "num_key_value_heads": 8}
    absent = shape_of(tmp_path, sizes)
    assert absent.rope_scaling["rope_type"] == "yarn"
    assert shape_of(tmp_path, sizes | {"rope_parameters": None}) == absent


def test_read_shape_scales_layers_without_windows(tmp_path):
    olmo3 = OF_FAMILY["olmo3"] | {"num_hidden_layers": 4, "rope_scaling": YARN, "rope_theta": 5e5}
    shape = shape_of(tmp_path, olmo3 | {"max_position_embeddings": 2048})
    assert shape.rope_scaling["factor"] == 8.0
    assert (shape.rope_theta, shape.window_rope_theta) == (5e5, 5e5)
    assert (shape.window, shape.windowed_layers) == (4096, (0, 1, 2))


def test_read_shape_has_the_end_tokens_of_a_chat(tmp_path):
    shape = shape_of(tmp_path, {"eos_token_id": 2}, {"eos_token_id": [5, 9]})
    assert shape.eos_token_ids == (5, 9)
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id is \['</s>'\]"):
        shape_of(tmp_path, {}, {"eos_token_id": ["</s>"]})


REFUSED = {
    "llama": [
        ({"model_type": "gemma"}, f"'gemma' is not supported; supported: {sorted(FAMILIES)}"),
        ({"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
        # Several at once, each with the supported values
        ({"mlp_bias": True, "hidden_act": "relu"}, "'relu', only 'silu' is supported; mlp_bias is"),
        ({"quantization_config": "fp8"}, "quantization_config must be an object"),
        (FP8 | {"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn', supported: ['bfloat16'"),
        # Keys that shared code reads
        ({"add_cross_attention": True}, "add_cross_attention is True, only"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, only"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config is {'0': {'head_dim': 8}"),
        ({"rotary_emb_fraction": 0.5}, "rotary_emb_fraction is 0.5, only"),
        ({"rotary_pct": 0.5}, "rotary_pct is 0.5, only"),
        ({"rswa_window": 128}, "rswa_window is 128, only"),
        ({"text_config": {"hidden_size": 8}}, "text_config is {'hidden_size': 8}, only"),
        # Null with another meaning, and NaN
        ({"is_causal": None}, "is_causal is None, only True"),
        ({"attention_dropout": float("nan")}, "attention_dropout is nan"),
        ({"layer_types": 5}, "layer_types is 5, only a list"),
        ({"layer_types": [["full_attention"]]}, "layer_types contains "),
        ({"num_key_value_heads": 3}, "num_key_value_heads(3) must divide num_attention_heads(4)"),
        ({"head_dim": 25}, "head_dim is 25; it must be even"),
        # RoPE
        ({"rope_scaling": {"type": "longrope"}}, "'longrope' is not supported for llama; su"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "RoPE scaling ['linear'] is not supported"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be null or an object"),
        ({"rope_scaling": {"type": "linear"}}, "linear RoPE scaling has no factor"),
        ({"rope_scaling": LINEAR_ROPE | {"factor": None}}, "factor is None"),
        ({"rope_parameters": {"full_attention": {}}}, "separate RoPE parameters for ['full_att"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor is None"),
        (
            {"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 4}},
            "low_freq_factor(4) must be less than high_freq_factor(4)",
        ),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "RoPE partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"rope_dim": 8}}, "RoPE rope_dim is 8"),
        ({"rope_scaling": {"use_fope": True}}, "RoPE use_fope is True"),
        # Values that make no sense
        ({"hidden_size": None}, "hidden_size is None; it must be an integer of at least 1"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; it must be a finite number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rope_theta": True}, "rope_theta is True"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; it must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; it must be a token id or a list"),
        ({"eos_token_id": [1, -1]}, "eos_token_id is [1, -1]"),
        # Required keys
        ({"model_type": "deepseek_v3"}, "scoring_func is None, only 'sigmoid' is supported; topk_"),
    ],
    "deepseek_v3": [
        ({"quantization_config": {"fmt": "e4m3"}}, "quant_method None, supported: 'f"),
        ({"topk_method": None}, "topk_method is None, only 'noaux_tc'"),
        ({"rope_interleave": None}, "rope_interleave is None, only True"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace(2) leaves none of num"),
        ({"mlp_layer_types": ["sparse"] * 2}, "mlp_layer_types must have 'dense'"),
        ({"num_key_value_heads": 2}, "(2) must be num_attention_heads(4), as latent"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; it must be even, as RoPE"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok is 1; it must be at least"),
        ({"n_group": 7}, "n_group(7) must divide n_routed_experts(256) into groups"),
        ({"n_group": 256}, "n_group(256) must divide n_routed_experts(256)"),
        ({"n_group": 2}, "topk_group(4) must be at most n_group(2)"),
        ({"topk_group": 3}, "at most n_group(8), and half of num_experts_per_tok(8)"),
        ({"n_shared_experts": -1}, "is -1; it must be an integer of at least 0"),
        ({"rope_scaling": LINEAR_ROPE}, "'linear' is not supported for deepseek_v3; s"),
    ],
    "deepseek_v32": [
        ({"layer_types": [FULL] * 2}, "layer_types must have 'indexed_attention' f"),
        ({"q_lora_rank": None}, "q_lora_rank is null; indexers need a latent of q"),
        ({"index_head_dim": 48}, "(48) must be at least qk_rope_head_dim(64)"),
    ],
    "glm_moe_dsa": [
        ({"indexer_rope_interleave": None}, "indexer_rope_interleave is None, only True is suppor"),
        ({"indexer_types": ["full", "shared"]}, "indexer_types must have 'full' for every layer"),
    ],
    # With null, transformers rotates whole heads and vLLM half of each.
    "glm4_moe": [({"partial_rotary_factor": None}, "partial_rotary_factor is None, only 0.5 is s")],
    "glm4_moe_lite": [({"first_k_dense_replace": None}, "first_k_dense_replace is None, only 1")],
    "minimax_m2": [
        (
            dict.fromkeys(ROUTER_OF_MINIMAX),
            "scoring_func is None, only 'sigmoid' is supported; use_routing_bias is None",
        ),
    ],
    "gpt_oss": [
        ({"layer_types": ["full_attention"] * 2}, "layer_types is ['full_attention', 'f"),
        ({"rope_scaling": GPT_OSS_YARN | {"mscale": 2.0}}, "RoPE mscale is 2.0, only None"),
    ],
    "qwen2": [
        ({"use_sliding_window": "no"}, "use_sliding_window is 'no'; it must be true or"),
        (
            {"layer_types": [WINDOWED] * 2},
            "with sliding_window None, use_sliding_window False",
        ),
        ({"layer_types": [FULL]}, "one for each of num_hidden_layers(2)"),
    ],
    "phi3": [
        # With transformers no token sees any other.
        ({"sliding_window": 0}, "sliding_window is 0; it must be an integer of at least 1"),
        ({"rope_scaling": LINEAR_ROPE}, "'linear' is not supported for phi3; support"),
    ],
    "olmo3": [
        ({"sliding_window": -4}, "sliding_window is -4; it must be an integer of at least"),
        ({"sliding_window": None}, "accepts that only if layer_types says full_attention"),
        ({"layer_types": ["chunked_attention"] * 2}, "contains ['chunked_attention'], onl"),
        ({"rope_parameters": LINEAR_ROPE}, "must have an object for full_attention and"),
        ({"rope_parameters": {WINDOWED: LINEAR_ROPE}}, "'linear' of sliding_attention is"),
        ({"rope_parameters": {FULL: 5}}, "rope_parameters is {'full_attention': 5}; it mus"),
        ({"rope_scaling": 5}, "rope_scaling is 5; it must be null or an object"),
    ],
    "mixtral": [
        ({"sliding_window": 8, "layer_types": [FULL] * 2}, "only ['sliding_attention', "),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok is 1; it must be at least"),
    ],
    "qwen3_moe": [
        ({"num_experts": 4}, "num_experts_per_tok(8) is more than num_experts(4)"),
        (
            {"mlp_only_layers": [1], "decoder_sparse_step": 2},
            "mlp_only_layers([1]) and decoder_sparse_step(2) leaves none of num_hidden_layers(2)",
        ),
        ({"mlp_only_layers": 1}, "mlp_only_layers is 1; it must be a list of layers"),
    ],
    "qwen3_next": [
        ({"shared_expert_intermediate_size": 0}, "is 0; it must be an integer of at"),
        ({"layer_types": ["linear_attention"] * 2}, "and full_attention at least once"),
        ({"layer_types": [[FULL], FULL]}, "it must list ['full_attention', 'linear_a"),
    ],
    "nemotron_h": [
        (  # transformers uses intermediate_size instead
            {
                "layers_block_type": ["linear_attention", "full_attention", "moe"],
                "num_key_value_heads": 2,
                "moe_shared_expert_intermediate_size": 0,
            },
            "moe_shared_expert_intermediate_size is 0; it must be an integer of at least 1",
        ),
        ({"time_step_min": 0.01}, "time_step_min is 0.01; it must be at most 0.001"),
        ({"mamba_n_groups": 4}, "mamba_n_groups is 4, only None is supported"),
        ({"mamba_d_conv": 2}, "mamba_d_conv is 2, only None is supported"),
        ({"mamba_conv_bias": True}, "mamba_conv_bias is True, only None is supp"),
    ],
}


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [(family, *row) for family, rows in REFUSED.items() for row in rows],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_read_shape_refuses_other_numbers_and_nonsense(tmp_path, family, change, message):
    with pytest.raises(ValueError) as error:
        shape_of(tmp_path, OF_FAMILY[family] | change)
    assert str(error.value).startswith(str(tmp_path / "config.json"))
    assert message in str(error.value)


@pytest.mark.parametrize("value", [None, False, 0, []])
def test_read_shape_takes_any_word_for_unused(tmp_path, value):
    unused = dict.fromkeys(("mlp_only_layers", "use_sliding_window", "attention_dropout"), value)
    shape_of(tmp_path, OF_FAMILY["qwen3_moe"] | unused)


@pytest.mark.parametrize(
    ("text", "words"), [("[" * 100_000, "not valid JSON"), ("[1]", "holds list")]
)
def test_read_shape_names_a_broken_config(tmp_path, text, words):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_shape(tmp_path)
