"""MiniMax-M2: Mixtral with norms over all heads, RoPE of half a head, and a router with biases."""

from checkpoint_convert.families.description import Experts, Family

MINIMAX_M2 = Family(
    model_type="minimax_m2",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "rope_theta": 5e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": 200020,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "num_mtp_modules": 0,
    },
    # transformers knows no other values of most of these.
    required={
        "attention_bias": False,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "shared_intermediate_size": 0,
    },
    # Without them vLLM does not start, or has no biases.
    explicit={"scoring_func": "sigmoid", "use_routing_bias": True},
    qk_norm=True,
    norms_all_heads=True,
    are_norms_split_in_engine=True,
    partial_rotary_factor=0.5,
    rotary_size="rotary_dim",
    num_mtp_layers="num_mtp_modules",
    experts=Experts(
        num_experts="num_local_experts",
        intermediate_size="intermediate_size",
        normalize_topk=None,
        block="block_sparse_moe",
        gate="w1",
        up="w3",
        down="w2",
        score_function="sigmoid",
        bias="e_score_correction_bias",
        is_router_float32_in_engine=True,
    ),
)
