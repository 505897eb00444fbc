"""GLM-4.5 to 4.7: a shared expert, experts chosen by biased sigmoid scores, dense layers first."""

from checkpoint_convert.families.description import Experts, Family, Mtp, Norms, Rope
from checkpoint_convert.families.engines import Engines, Sglang, Vllm

GLM4_MOE = Family(
    model_type="glm4_moe",
    defaults={
        "num_key_value_heads": 8,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "attention_bias": False,
        "use_qk_norm": False,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
    # vLLM never ties the head. Megatron-Core always scales sigmoid scores to sum to 1. No published
    # model has groups of experts.
    required={
        "tie_word_embeddings": False,
        "sliding_window": None,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
    },
    attention_bias="attention_bias",
    norms=Norms(of_heads="use_qk_norm"),
    rope=Rope(partial_factor=0.5),
    experts=Experts(
        num_experts="n_routed_experts",
        intermediate_size="moe_intermediate_size",
        normalize_topk="norm_topk_prob",
        score_function="sigmoid",
        weight_scale="routed_scaling_factor",
        num_shared="n_shared_experts",
        num_dense_layers="first_k_dense_replace",
    ),
    mtp=Mtp("num_nextn_predict_layers"),
    engines=Engines(vllm=Vllm(has_float32_router=True), sglang=Sglang(was_tried_in_groups=True)),
)
