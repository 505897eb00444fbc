"""config.json -> ModelShape: what transformers writes, older formats, and keys that are refused."""

import inspect
import json
import re
from dataclasses import fields, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers
from transformers.models.llama import LlamaConfig

from checkpoint_convert import LatentShape, ModelShape, MoeShape, read_shape
from helpers.models import CONFIGS, LATENTS, NEVER_TIED, OWN_FIELDS

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 250,
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": None}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_key_value_heads": 2}
QWEN3_MOE = LLAMA | {"model_type": "qwen3_moe"}
ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
DEEPSEEK_V3 = (
    LLAMA
    | ROUTER
    | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
    }
)
GLM4_MOE_LITE = (
    LLAMA | {"model_type": "glm4_moe_lite", "num_key_value_heads": 4} | {"first_k_dense_replace": 1}
)


def folder_with(folder, config, generation_config=None):
    (folder / "config.json").write_text(json.dumps(config))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder


def tiny_config(family, **overrides):
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
    return CONFIGS[family](**(tiny | OWN_FIELDS.get(family, {}) | overrides))


@pytest.mark.parametrize("family", CONFIGS)
def test_what_transformers_saves_is_read_back(tmp_path, family):
    tiny_config(family).save_pretrained(tmp_path)
    experts = MoeShape(
        num_experts=4, experts_per_token=2, intermediate_size=96, normalize_topk=True
    )
    mixtures = {
        "deepseek_v3": MoeShape(
            num_experts=8,
            experts_per_token=4,
            intermediate_size=48,
            normalize_topk=True,
            score_function="sigmoid",
            num_groups=4,
            groups_per_token=2,
            weight_scale=1.5,
            shared_intermediate_size=48,
            num_dense_layers=1,
        ),
        "glm4_moe": replace(
            experts,
            intermediate_size=48,
            score_function="sigmoid",
            weight_scale=1.5,
            shared_intermediate_size=96,
            num_dense_layers=1,
        ),
        "glm4_moe_lite": replace(
            experts,
            intermediate_size=48,
            score_function="sigmoid",
            weight_scale=1.8,
            shared_intermediate_size=48,
            num_dense_layers=1,
        ),
        "mixtral": experts,
        "qwen3_moe": replace(experts, intermediate_size=48),
    }
    assert read_shape(tmp_path) == ModelShape(
        family=family,
        num_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4 if family in LATENTS else 2,
        head_dim=24,
        intermediate_size=96,
        vocab_size=250,
        tie_word_embeddings=family not in NEVER_TIED,
        attention_bias=family in ("glm4_moe", "qwen2"),
        qk_norm=family in ("glm4_moe", "qwen3", "qwen3_moe"),
        rope_theta=5e5,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        eos_token_ids=(7, 8),
        partial_rotary_factor=0.5 if family == "glm4_moe" else 1.0,
        moe=mixtures.get(family),
        latent=(
            LatentShape(
                query_rank=24,
                rank=32,
                rotary_dim=8,
                value_dim=12 if family == "deepseek_v3" else 24,
            )
            if family in LATENTS
            else None
        ),
    )


# Required keys: without them transformers assumes values that we refuse.
MUST_SAY = {
    "deepseek_v3": ROUTER | {"num_attention_heads": 128, "num_hidden_layers": 4},
    "mistral": {"sliding_window": None},
    "glm4_moe": {"head_dim": 2},
    "glm4_moe_lite": {"num_attention_heads": 20, "first_k_dense_replace": 1},
}


@pytest.mark.parametrize("family", CONFIGS)
def test_absent_keys_have_the_defaults_of_transformers(tmp_path, family):
    minimal = LLAMA | {"num_attention_heads": 32} | MUST_SAY.get(family, {})
    config = CONFIGS[family](**{k: v for k, v in minimal.items() if k != "model_type"})
    shape = read_shape(folder_with(tmp_path, minimal | {"model_type": family}))
    assert shape.num_key_value_heads == config.num_key_value_heads
    if shape.latent is None:
        assert shape.head_dim == (getattr(config, "head_dim", None) or 2)  # hidden_size / heads
    else:
        assert shape.head_dim == config.qk_nope_head_dim + config.qk_rope_head_dim
        assert shape.latent == LatentShape(
            query_rank=config.q_lora_rank,
            rank=config.kv_lora_rank,
            rotary_dim=config.qk_rope_head_dim,
            value_dim=config.v_head_dim,
        )
    assert shape.rms_norm_eps == config.rms_norm_eps
    assert shape.rope_theta == config.rope_parameters["rope_theta"]
    assert shape.max_position_embeddings == config.max_position_embeddings
    assert shape.tie_word_embeddings == config.tie_word_embeddings
    eos = config.eos_token_id
    assert shape.eos_token_ids == (() if eos is None else (eos,))
    if shape.moe is not None:
        size = getattr(config, "moe_intermediate_size", config.intermediate_size)
        assert shape.moe == MoeShape(
            num_experts=config.num_local_experts,
            experts_per_token=config.num_experts_per_tok,
            intermediate_size=size,
            normalize_topk=getattr(config, "norm_topk_prob", True),
            score_function="sigmoid" if family in NEVER_TIED else "softmax",
            num_groups=getattr(config, "n_group", 1),
            groups_per_token=getattr(config, "topk_group", 1),
            weight_scale=getattr(config, "routed_scaling_factor", 1.0),
            shared_intermediate_size=getattr(config, "n_shared_experts", 0) * size,
            num_dense_layers=getattr(config, "first_k_dense_replace", 0),
        )


def test_half_rotated_heads_without_the_factor_are_refused_as_null_and_read_as_absent(tmp_path):
    """With null, transformers rotates whole heads, and vLLM half of each."""
    glm = LLAMA | {"model_type": "glm4_moe", "head_dim": 16, "num_key_value_heads": 2}
    assert read_shape(folder_with(tmp_path, glm)).partial_rotary_factor == 0.5
    with pytest.raises(ValueError, match=r"partial_rotary_factor is None, only 0\.5 is supp"):
        read_shape(folder_with(tmp_path, glm | {"partial_rotary_factor": None}))


# Fields of transformers' configs that cannot change the numbers of a forward pass.
HARMLESS = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "chunk_size_feed_forward",  # none of our families reads it
    "dtype",  # of the stored weights, whose files say it too
    "id2label",
    "initializer_range",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",  # transformers gives this row of the embedding no gradient
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",  # of transformers' own loss
    "transformers_version",
    "use_cache",
    # Shared code reads these, with a default:
    "classifier_dropout",  # this and the next two: of heads other than language models
    "hidden_dropout",
    "token_classification_bias",
    "compile_config",  # this and the next two: how and where the model runs
    "distributed_config",
    "gradient_checkpointing",
    "init_std",  # this and the next: of new weights
    "initializer_factor",
    "sep_token_id",
    "target_layer_count",  # of a draft model
    "first_k_dense_replace",  # of layers for multi-token prediction, which our families lack
    "chain_hidden_post_norm",
    "logits_mup_width_multiplier",
    "mlp_layer_types",
    "mtp_hidden_states_first",
    "mtp_layer_types",
    "mtp_mlp_layer_types",
    "mtp_per_layer_config",
    "num_mtp_layers",
    "unpadded_vocab_size",
    "number_of_conv_states",  # linear attention, which layer_types would name
}
# Also harmless in families with the key `use_sliding_window`.
BEHIND_USE_SLIDING_WINDOW = {"max_window_layers", "sliding_window"}
# Also harmless in a family with latent attention.
OF_LATENTS = {
    "qk_head_dim",  # transformers writes the sum of both parts here
    "moe_router_dtype",  # how exactly vLLM computes the scores of experts
    "index_topk_freq",  # this and the next two: behind index_topk
    "index_topk_pattern",
    "index_skip_topk_offset",
    "indexer_rope_interleave",
}
# Harmless in a family whose mixture is not DeepSeek's, which reads these.
OF_DEEPSEEK_MIXTURES = set(ROUTER)
# Values that differ from those of `tiny_config`, where `other_value` cannot derive one.
OTHER_VALUES = {
    "eos_token_id": 3,
    "head_dim": 32,
    "hidden_act": "gelu",
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 3,
    "logit_scale": 0.5,
    "mlp_only_layers": [1],
    "model_type": "gemma",
    "moe_layer_freq": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_local_experts": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10.0},
    "scoring_func": "softmax",
    "sliding_window": 128,
    "topk_method": "group_limited_greedy",
}


def other_value(name, value):
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    return not value if isinstance(value, bool) else (value or 0) + 1


# Modules of transformers that all models use, and that read keys which a config may lack.
SHARED_MODULES = (
    "cache_utils",
    "configuration_utils",
    "masking_utils",
    "modeling_layers",
    "modeling_rope_utils",
    "modeling_utils",
)


# Where vLLM's model of a family is, if not in a file of the same name only.
VLLM_FILES = {
    "deepseek_v3": ("deepseek_v2",),
    "glm4_moe_lite": ("glm4_moe_lite", "glm4_moe", "deepseek_v2"),
    "mistral": ("mistral", "llama"),
}


def asked_for(source):
    """Names that code reads from a config by getattr or hasattr, since it may lack them."""
    return set(re.findall(r'attr\(\s*(?:\w+\.)*\w*config,\s*"([a-z]\w*)"', source))


def names_that_are_read(config):
    """Keys with which a config is saved, and those that transformers and vLLM read from it."""
    model = import_module(type(config).__module__.replace("configuration", "modeling"))
    read = re.findall(r'config(?:, "|\.)([a-z]\w+)', inspect.getsource(model))
    sources = [Path(transformers.__file__).with_name(f"{name}.py") for name in SHARED_MODULES]
    # Find vLLM's files without importing it, which works on any device.
    models = Path(find_spec("vllm").origin).with_name("model_executor") / "models"
    files = VLLM_FILES.get(config.model_type, (config.model_type,))
    sources += [models / f"{name}.py" for name in files]
    asked = set().union(*(asked_for(path.read_text()) for path in sources))
    names = {field.name for field in fields(config)} | set(config.to_dict()) | set(read) | asked
    return names - set(config.attribute_map)  # these are aliases


@pytest.mark.parametrize("family", CONFIGS)
def test_every_key_that_is_read_anywhere_is_carried_over_refused_or_harmless(tmp_path, family):
    config = tiny_config(family)
    names = names_that_are_read(config)
    harmless = HARMLESS | (BEHIND_USE_SLIDING_WINDOW if "use_sliding_window" in names else set())
    harmless -= {"first_k_dense_replace"} if family in NEVER_TIED else set()
    harmless |= OF_LATENTS if family in LATENTS else set()
    harmless |= OF_DEEPSEEK_MIXTURES if family == "glm4_moe_lite" else set()
    saved = json.loads(config.to_json_string())
    shape = read_shape(folder_with(tmp_path, saved))
    ignored = []
    for name in sorted(names - harmless):
        changed = saved | {name: other_value(name, saved.get(name))}
        try:
            if read_shape(folder_with(tmp_path, changed)) == shape:
                ignored.append(name)
        except ValueError as error:
            assert name in str(error), f"{name}: {error}"
    assert not ignored, f"do they change what a {family} computes? {ignored}"


def test_latent_attention_may_have_no_latent_of_queries(tmp_path):
    config = DEEPSEEK_V3 | {"q_lora_rank": None, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8}
    shape = read_shape(folder_with(tmp_path, config))
    assert shape.latent == LatentShape(query_rank=None, rank=512, rotary_dim=8, value_dim=128)
    assert (shape.head_dim, shape.rotary_dim, shape.value_dim) == (32, 8, 128)


@pytest.mark.parametrize("config", [DEEPSEEK_V3, GLM4_MOE_LITE], ids=lambda c: c["model_type"])
def test_head_dim_can_only_be_the_part_of_a_head_that_transformers_rotates(tmp_path, config):
    shape = read_shape(folder_with(tmp_path, config | {"head_dim": 64}))
    assert (shape.head_dim - shape.rotary_dim, shape.rotary_dim) in ((128, 64), (192, 64))
    for head_dim, found in ((128, 128), (None, 16)):  # transformers divides the hidden size by 4
        with pytest.raises(ValueError, match=rf"head_dim is {found}; .*qk_rope_head_dim\(64\)"):
            read_shape(folder_with(tmp_path, config | {"head_dim": head_dim}))


def test_experts_without_groups_need_not_be_two_for_each(tmp_path):
    ungrouped = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "n_routed_experts": 63}
    moe = read_shape(folder_with(tmp_path, DEEPSEEK_V3 | ungrouped)).moe
    assert (moe.num_groups, moe.groups_per_token, moe.experts_per_token) == (1, 1, 6)


@pytest.mark.parametrize("spelling", ["num_experts", "num_local_experts"])
@pytest.mark.parametrize("config", [MIXTRAL, QWEN3_MOE], ids=["mixtral", "qwen3_moe"])
def test_the_number_of_experts_is_read_in_both_spellings_that_transformers_reads(
    tmp_path, config, spelling
):
    assert read_shape(folder_with(tmp_path, config | {spelling: 16})).moe.num_experts == 16


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": LINEAR_ROPE, "rope_theta": 5e5},
        {"rope_parameters": LINEAR_ROPE | {"rope_theta": 1e6}, "rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": LINEAR_ROPE},
        {"rope_scaling": LINEAR_ROPE | {"type": "yarn"}},
        {"rope_scaling": LLAMA3_ROPE},
        {"rope_scaling": LLAMA3_ROPE, "original_max_position_embeddings": 8192},
        {
            "rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 4096},
            "original_max_position_embeddings": 8192,
        },
        {"rope_scaling": LINEAR_ROPE, "original_max_position_embeddings": 4096},
        {"rope_scaling": None},
    ],
    ids=str,
)
def test_rope_that_is_said_twice_is_read_as_transformers_reads_it(tmp_path, rope):
    shape = read_shape(folder_with(tmp_path, LLAMA | rope))
    config = LlamaConfig.from_pretrained(tmp_path)
    config.standardize_rope_params()  # as the model does before it uses them
    expected = config.rope_parameters
    scaling = shape.rope_scaling or {"rope_type": "default"}
    assert scaling | {"rope_theta": shape.rope_theta} == {
        key: value for key, value in expected.items() if key != "type"
    }


def test_linear_rope_scaling_is_carried_over(tmp_path):
    shape = read_shape(folder_with(tmp_path, LLAMA | {"rope_parameters": LINEAR_ROPE}))
    assert shape.rope_scaling == LINEAR_ROPE
    older = {"type": "linear", "factor": 4.0}
    assert shape == read_shape(folder_with(tmp_path, LLAMA | {"rope_scaling": older}))


@pytest.mark.parametrize("rope", [LINEAR_ROPE, LLAMA3_ROPE], ids=["linear", "llama3"])
def test_rope_parameters_that_compute_nothing_make_no_other_model(tmp_path, rope):
    idle = {"partial_rotary_factor": 1.0, "attention_factor": None, "use_fope": False}
    if rope is LINEAR_ROPE:
        idle["original_max_position_embeddings"] = 4096
    shape = read_shape(folder_with(tmp_path, LLAMA | {"rope_scaling": rope | idle}))
    assert shape.rope_scaling == rope


def test_a_partial_rotary_factor_of_null_is_none(tmp_path):
    shape = read_shape(folder_with(tmp_path, LLAMA | {"partial_rotary_factor": None}))
    config = LlamaConfig.from_pretrained(tmp_path)
    assert "partial_rotary_factor" not in config.rope_parameters
    assert shape == read_shape(folder_with(tmp_path, LLAMA))


def test_both_ways_to_write_rope_scaling_are_read_alike(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "oldest").mkdir()
    oldest = {"type" if k == "rope_type" else k: v for k, v in LLAMA3_ROPE.items()}
    new = LLAMA | {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 5e5}}
    shapes = [
        read_shape(folder_with(tmp_path / "new", new)),
        read_shape(
            folder_with(tmp_path / "old", LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE})
        ),
        read_shape(
            folder_with(tmp_path / "oldest", LLAMA | {"rope_theta": 5e5, "rope_scaling": oldest})
        ),
    ]
    assert shapes[0] == shapes[1] == shapes[2]
    assert shapes[0].rope_scaling == LLAMA3_ROPE
    assert shapes[0].rope_theta == 5e5


def test_the_end_tokens_of_a_chat_model_come_from_its_generation_config(tmp_path):
    folder_with(tmp_path, LLAMA | {"eos_token_id": 2}, {"eos_token_id": [5, 9]})
    assert read_shape(tmp_path).eos_token_ids == (5, 9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"model_type": "gemma"},
            ["'gemma'", str(sorted(CONFIGS))],
        ),
        ({"attention_bias": True}, ["attention_bias is True, only False"]),
        ({"mlp_bias": True}, ["mlp_bias is True"]),
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu', only 'silu'"]),
        ({"attention_dropout": 0.1}, ["attention_dropout is 0.1"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config is {'bits': 4}"]),
        (
            DEEPSEEK_V3 | {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}},
            [
                "quantization_config is {'quant_method': 'fp8'",
                "convert the weights to bfloat16 first",
                "fp8_cast_bf16.py",
                "take the key out of config.json",
            ],
        ),
        *[
            (DEEPSEEK_V3 | {key: value}, [f"{key} is {value!r}, only {carried!r}"])
            for key, value, carried in [
                ("scoring_func", "softmax", "sigmoid"),
                ("scoring_func", None, "sigmoid"),
                ("topk_method", "greedy", "noaux_tc"),
                ("topk_method", None, "noaux_tc"),
                ("norm_topk_prob", False, True),
                ("tie_word_embeddings", True, False),
                ("attention_bias", True, False),
                ("rope_interleave", False, True),
                ("rope_interleave", None, True),  # false to transformers
                ("moe_layer_freq", 2, 1),
                ("index_topk", 2048, None),
                ("llama_4_scaling", {"beta": 0.1}, None),
                ("sliding_window", 4096, None),
            ]
        ],
        (LLAMA | {"model_type": "deepseek_v3"}, ["scoring_func is None", "topk_method is None"]),
        (
            DEEPSEEK_V3 | {"num_key_value_heads": 2},
            ["num_key_value_heads(2) must be num_attention_heads(4), as latent attention has"],
        ),
        (
            DEEPSEEK_V3 | {"qk_rope_head_dim": 7},
            ["qk_rope_head_dim is 7; it must be even, as RoPE rotates pairs"],
        ),
        (
            DEEPSEEK_V3 | {"n_group": 7},
            ["n_group(7) must divide n_routed_experts(256) into groups of at least 2"],
        ),
        (DEEPSEEK_V3 | {"n_group": 256}, ["n_group(256) must divide n_routed_experts(256)"]),
        (
            DEEPSEEK_V3 | {"topk_group": 3},
            [
                "topk_group(3) must be at most n_group(8), and half of num_experts_per_tok(8); "
                "without groups, topk_group and n_group are 1"
            ],
        ),
        (
            DEEPSEEK_V3 | {"n_group": 2},
            ["topk_group(4) must be at most n_group(2)"],
        ),
        (
            DEEPSEEK_V3 | {"first_k_dense_replace": 2},
            ["first_k_dense_replace(2) leaves none of num_hidden_layers(2) with experts"],
        ),
        (
            DEEPSEEK_V3 | {"mlp_layer_types": ["sparse", "sparse"]},
            ["of num_hidden_layers(2), mlp_layer_types must have 'dense' for the first 1"],
        ),
        (
            GLM4_MOE_LITE | {"first_k_dense_replace": None},
            ["first_k_dense_replace is None, only 1 is supported"],
        ),
        (DEEPSEEK_V3 | {"num_experts_per_tok": 1}, ["num_experts_per_tok is 1; it must be at"]),
        (
            DEEPSEEK_V3 | {"rope_scaling": LINEAR_ROPE},
            [
                "RoPE scaling 'linear' is not supported for latent attention, which vLLM always "
                "scales by yarn; supported: ['default', 'yarn']"
            ],
        ),
        (DEEPSEEK_V3 | {"rope_scaling": LLAMA3_ROPE}, ["RoPE scaling 'llama3' is not supported"]),
        ({"model_type": "qwen2", "use_sliding_window": True}, ["use_sliding_window is True"]),
        ({"model_type": "qwen3", "attention_bias": True}, ["attention_bias is True"]),
        ({"layer_types": ["sliding_attention"] * 2}, ["['sliding_attention']"]),
        # Mistral 7B v0.1, whose window transformers also assumes if the key is absent
        (MISTRAL | {"sliding_window": 4096}, ["sliding_window is 4096, only None"]),
        ({"model_type": "mistral"}, ["sliding_window is 4096, only None"]),
        (MIXTRAL | {"sliding_window": 4096}, ["sliding_window is 4096"]),
        (MIXTRAL | {"router_jitter_noise": 0.1}, ["router_jitter_noise is 0.1"]),
        (MIXTRAL | {"num_local_experts": 1}, ["num_experts_per_tok(2)", "experts(1)"]),
        (QWEN3_MOE | {"num_experts": 4}, ["num_experts_per_tok(8)", "num_experts(4)"]),
        (QWEN3_MOE | {"num_experts": 0}, ["num_experts is 0"]),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, ["decoder_sparse_step is 2, only 1"]),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, ["mlp_only_layers is [0], only []"]),
        (
            QWEN3_MOE | {"shared_expert_intermediate_size": 64},
            ["shared_expert_intermediate_size is 64"],
        ),
        (LLAMA | {"sliding_window": 4096}, ["sliding_window is 4096"]),
        (MISTRAL | {"attention_bias": True}, ["attention_bias is True"]),
        ({"is_causal": False}, ["is_causal is False, only True"]),
        ({"is_causal": None}, ["is_causal is None"]),
        ({"rswa_window": 128}, ["rswa_window is 128, only None"]),
        (
            {"model_type": "qwen2", "dual_chunk_attention_config": {"chunk_size": 8192}},
            ["dual_chunk_attention_config is {'chunk_size': 8192}"],
        ),
        ({"add_cross_attention": True}, ["add_cross_attention is True"]),
        ({"is_encoder_decoder": True}, ["is_encoder_decoder is True"]),
        ({"compression_config": {"format": "int"}}, ["compression_config is {'format': 'int'}"]),
        ({"text_config": {"hidden_size": 8}}, ["text_config is {'hidden_size': 8}"]),
        ({"transformers_weights": "b.safetensors"}, ["transformers_weights is 'b.safetensors'"]),
        ({"rotary_pct": 0.5}, ["rotary_pct is 0.5"]),
        ({"rotary_emb_fraction": 0.5}, ["rotary_emb_fraction is 0.5"]),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, ["per_layer_config is {'0'"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor is 0.5, only 1.0"]),
        (
            {"rope_scaling": {"type": "longrope", "factor": 4.0}},
            ["'longrope'", "['default', 'linear', 'llama3', 'yarn']"],
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, ["'dynamic'"]),
        ({"rope_scaling": {"type": "linear"}}, ["linear RoPE scaling has no factor"]),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}},
            ["separate RoPE parameters for ['full_attention']"],
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            ["RoPE low_freq_factor is None, only 1.0"],
        ),
        (
            {"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 2.0}},
            ["RoPE low_freq_factor is 2.0, only 1.0"],
        ),
        (
            {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            ["RoPE partial_rotary_factor is 0.5"],
        ),
        ({"rope_scaling": {"rope_type": "llama3"}}, ["has no factor"]),
        (
            {"rope_scaling": LLAMA3_ROPE, "original_max_position_embeddings": 4096},
            ["RoPE original_max_position_embeddings is 4096, only 8192"],
        ),
        ({"rope_scaling": {"rope_type": "default", "rope_dim": 8}}, ["RoPE rope_dim is 8"]),
        ({"rope_scaling": {"rope_type": "default", "use_fope": True}}, ["RoPE use_fope is True"]),
        ({"hidden_size": None}, ["hidden_size is None", "at least 1"]),
        ({"num_hidden_layers": "2"}, ["num_hidden_layers is '2'"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads(3)", "num_attention_heads(4)"]),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_name(tmp_path, change, words):
    with pytest.raises(ValueError) as error:
        read_shape(folder_with(tmp_path, LLAMA | change))
    for word in [*words, str(tmp_path / "config.json")]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
        ({"layer_types": 5}, "layer_types is 5, only a list"),
        ({"layer_types": [["full_attention"]]}, "layer_types contains "),
        ({"rms_norm_eps": None}, "rms_norm_eps is None; it must be a finite number above 0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": None}, "rope_theta is None; it must be a finite number above 0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rope_theta": True}, "rope_theta is True"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta is -1.0"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be null or an object"),
        ({"rope_parameters": [1.0]}, "rope_parameters is [1.0]; it must be null or an object"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "RoPE scaling ['linear'] is not supported"),
        ({"rope_scaling": LINEAR_ROPE | {"factor": None}}, "factor is None"),
        ({"rope_scaling": LINEAR_ROPE | {"factor": "4"}}, "factor is '4'"),
        (
            {"rope_scaling": LINEAR_ROPE | {"factor": 0}},
            "factor is 0; it must be a finite number above 0",
        ),
        ({"rope_scaling": LINEAR_ROPE | {"factor": -4.0}}, "factor is -4.0"),
        ({"rope_scaling": LLAMA3_ROPE | {"factor": float("inf")}}, "factor is inf"),
        (QWEN3_MOE | {"norm_topk_prob": "no"}, "norm_topk_prob is 'no'; it must be true or false"),
        (
            {"tie_word_embeddings": "false"},
            "tie_word_embeddings is 'false'; it must be true or false",
        ),
        ({"tie_word_embeddings": None}, "tie_word_embeddings is None"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; it must be a token id or a list"),
        ({"eos_token_id": [1, "</s>"]}, "eos_token_id is [1, '</s>']"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eos_token_id": float("nan")}, "eos_token_id is nan"),
        ({"head_dim": 25}, "head_dim is 25; it must be even"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"attention_dropout": float("nan")}, "attention_dropout is nan"),
        ({"vocab_size": float("inf")}, "vocab_size is inf"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_a_value_that_makes_no_sense_is_refused_with_what_is_wanted(tmp_path, change, words):
    with pytest.raises(ValueError) as error:
        read_shape(folder_with(tmp_path, LLAMA | change))
    assert str(error.value).startswith(str(tmp_path / "config.json"))
    assert words in str(error.value)


def test_end_tokens_that_make_no_sense_are_named_with_their_file(tmp_path):
    folder_with(tmp_path, LLAMA, {"eos_token_id": ["</s>"]})
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id is \['</s>'\]"):
        read_shape(tmp_path)


OF_LLAMA2 = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "pretraining_tp": 1,
    "eos_token_id": 2,
}
OF_LLAMA3 = {
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": LLAMA3_ROPE | {"factor": 8.0},
    "eos_token_id": [128001, 128008, 128009],
}
OF_LLAMA3_SMALL = OF_LLAMA3 | {"tie_word_embeddings": True, "rope_scaling": LLAMA3_ROPE}
OF_MISTRAL = {
    "model_type": "mistral",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "eos_token_id": 2,
}
OF_MIXTRAL = OF_MISTRAL | {
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
}
OF_QWEN2 = {
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_window_layers": 28,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "eos_token_id": 151645,
}
OF_QWEN3 = OF_QWEN2 | {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "rope_scaling": None,
    "sliding_window": None,
}
OF_QWEN3_MOE = OF_QWEN3 | {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
OF_MOONLIGHT = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_experts_per_tok": 6,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "eos_token_id": 163586,
}
TIED = {"tie_word_embeddings": True}
SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
# Fields of config.json of well-known models.
PUBLISHED = {
    "Llama-2-7b": (OF_LLAMA2, 32, 4096, 32, 32, 11008, 32000, 4096),
    "Llama-3.1-8B-Instruct": (OF_LLAMA3, 32, 4096, 32, 8, 14336, 128256, 131072),
    "Llama-3.1-70B-Instruct": (OF_LLAMA3, 80, 8192, 64, 8, 28672, 128256, 131072),
    "Llama-3.2-1B": (OF_LLAMA3_SMALL | {"head_dim": 64}, 16, 2048, 32, 8, 8192, 128256, 131072),
    "Llama-3.3-70B": (OF_LLAMA3 | {"head_dim": 128}, 80, 8192, 64, 8, 28672, 128256, 131072),
    "Mistral-7B-v0.3": (OF_MISTRAL, 32, 4096, 32, 8, 14336, 32768, 32768),
    "Mixtral-8x7B": (OF_MIXTRAL, 32, 4096, 32, 8, 14336, 32000, 32768),
    "Moonlight-16B-A3B": (OF_MOONLIGHT, 27, 2048, 16, 16, 11264, 163840, 8192),
    "Qwen2-7B": (OF_QWEN2, 28, 3584, 28, 4, 18944, 152064, 131072),
    "Qwen2.5-0.5B": (OF_QWEN2 | TIED, 24, 896, 14, 2, 4864, 151936, 32768),
    "Qwen2.5-72B": (OF_QWEN2, 80, 8192, 64, 8, 29568, 152064, 131072),
    "Qwen3-0.6B": (OF_QWEN3 | TIED, 28, 1024, 16, 8, 3072, 151936, 40960),
    "Qwen3-8B": (OF_QWEN3, 36, 4096, 32, 8, 12288, 151936, 40960),
    "Qwen3-30B-A3B": (OF_QWEN3_MOE, 48, 2048, 32, 4, 6144, 151936, 40960),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_well_known_models_are_read_as_transformers_reads_them(tmp_path, name):
    of_family, *sizes = PUBLISHED[name]
    config = of_family | dict(zip(SIZES, sizes, strict=True))
    shape = read_shape(folder_with(tmp_path, config))
    expected = CONFIGS[config["model_type"]].from_pretrained(tmp_path)
    head_dim = getattr(expected, "head_dim", None) or expected.hidden_size // sizes[2]
    assert shape.rotary_dim == head_dim
    assert shape.head_dim == getattr(expected, "qk_head_dim", head_dim)
    assert shape.rms_norm_eps == expected.rms_norm_eps
    assert shape.num_key_value_heads == expected.num_key_value_heads
    assert shape.tie_word_embeddings == expected.tie_word_embeddings
    rope = shape.rope_scaling or {"rope_type": "default"}
    assert rope | {"rope_theta": shape.rope_theta} == expected.rope_parameters
    assert (shape.moe is None) == (not hasattr(expected, "num_experts_per_tok"))


def test_every_refused_key_is_listed_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"hidden_act.*mlp_bias"):
        read_shape(folder_with(tmp_path, LLAMA | {"mlp_bias": True, "hidden_act": "relu"}))


@pytest.mark.parametrize("value", [None, False, 0, []])
def test_a_key_may_say_in_any_way_that_nothing_is_used(tmp_path, value):
    unused = {"mlp_only_layers": value, "use_sliding_window": value, "attention_dropout": value}
    read_shape(folder_with(tmp_path, QWEN3_MOE | unused))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        pytest.param("[" * 100_000, "not valid JSON", id="nested without end"),
        ("[1]", "holds list"),
    ],
)
def test_a_broken_config_is_named(tmp_path, text, words):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_shape(tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere does not exist"):
        read_shape(tmp_path / "nowhere")
