"""DeepSeek-V3, R1 and Moonlight (given a tokenizer.json): latent attention, grouped experts.

transformers adds 1e-6 in the norms of latents whatever `rms_norm_eps` says. vLLM and Megatron-Core
add `rms_norm_eps`, and so do we. The two are equal in DeepSeek's models, not in Moonlight.
"""

from checkpoint_convert.families.description import Experts, Family, Mtp, Rope
from checkpoint_convert.families.engines import Engines, Sglang, Vllm

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    defaults={
        "num_key_value_heads": 128,
        "intermediate_size": 18432,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
    # vLLM never ties the head. Megatron-Core always scales sigmoid scores to sum to 1. Only
    # transformers reads `attention_bias` and `rope_interleave`. Only vLLM reads the last three, of
    # DeepSeek-V2, of DeepSeek-V3.2's indexer and of Mistral's models. It also reads
    # `moe_router_dtype`, which may have any value: routers are float32 here and in transformers.
    required={
        "tie_word_embeddings": False,
        "attention_bias": False,
        "sliding_window": None,
        "norm_topk_prob": True,
        "rope_interleave": True,
        "moe_layer_freq": 1,
        "index_topk": None,
        "llama_4_scaling": None,
    },
    # Without these, vLLM scores by a softmax and adds no bias.
    explicit={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    experts=Experts(
        num_experts="n_routed_experts",
        intermediate_size="moe_intermediate_size",
        normalize_topk="norm_topk_prob",
        score_function="sigmoid",
        weight_scale="routed_scaling_factor",
        num_shared="n_shared_experts",
        num_dense_layers="first_k_dense_replace",
        has_groups=True,
    ),
    has_mla=True,
    rope=Rope(types=("default", "yarn")),  # vLLM always scales by yarn
    mtp=Mtp("num_nextn_predict_layers"),
    engines=Engines(
        vllm=Vllm(has_whole_shared_expert=True), sglang=Sglang(was_tried_in_groups=True)
    ),
)
