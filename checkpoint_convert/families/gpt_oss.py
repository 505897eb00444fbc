"""gpt-oss: Mixtral with sinks, biases everywhere, and a window in every other layer.

Weight files stack the experts of a layer; those that OpenAI publishes hold them in MXFP4.
"""

from checkpoint_convert.families.description import Experts, Family, Rope, Windows
from checkpoint_convert.families.engines import Engines, Sglang, Vllm

GPT_OSS = Family(
    model_type="gpt_oss",
    defaults={
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    },
    # vLLM reads none of these.
    required={
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    },
    attention_bias=True,
    has_output_bias=True,
    has_linear_biases=True,
    has_sinks=True,
    activation="swigluoai",
    windows=Windows(every=2),
    rope=Rope(
        types=("default", "yarn"),  # vLLM always scales by yarn, and has the factor that follows
        required={"attention_factor": None, "mscale": None, "mscale_all_dim": None},
    ),
    experts=Experts(
        num_experts="num_local_experts",
        intermediate_size="intermediate_size",
        normalize_topk=None,
        router="router",
        stacks="alternating",
    ),
    engines=Engines(
        vllm=Vllm(names={".self_attn.": ".attn.", "embed_tokens": "embedding"}),
        sglang=Sglang(
            names={
                ".attn.": ".self_attn.",
                "model.embedding.": "model.embed_tokens.",
                "w13_bias": "w13_weight_bias",
                "w2_bias": "w2_weight_bias",
            },
            has_windows=True,
            follows_stored_dtype=True,
            was_tried_in_groups=True,
        ),
    ),
)
