"""MiniMax-M2: Mixtral with norms over all heads, RoPE of half a head, and a router with biases."""

from checkpoint_convert.families.description import Experts, Family, Mtp, Norms, Rope
from checkpoint_convert.families.engines import Engines, Vllm

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
    norms=Norms(of_heads=True, over_all_heads=True),
    rope=Rope(partial_factor=0.5, size="rotary_dim"),
    mtp=Mtp("num_mtp_modules"),
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
    ),
    # vLLM's models/minimax_m2.py gives block_sparse_moe the prefix `mlp`.
    engines=Engines(vllm=Vllm(has_split_norms=True, has_float32_router=True, renames_experts=True)),
)
