"""GLM-4.7-Flash: the mixtures of GLM-4.5 with the latent attention of DeepSeek-V3.

As with DeepSeek-V3, transformers adds 1e-6 in the norms of latents; vLLM, Megatron-Core and we add
`rms_norm_eps`.
"""

from checkpoint_convert.families.deepseek_v3 import DEEPSEEK_V3
from checkpoint_convert.families.description import Family, Mtp, Rope
from checkpoint_convert.families.engines import Engines, Sglang, Vllm
from checkpoint_convert.families.glm4_moe import GLM4_MOE

GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",
    defaults={
        "num_key_value_heads": 20,
        "intermediate_size": 10240,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
    required={**DEEPSEEK_V3.required, "n_group": 1, "topk_group": 1},
    # transformers takes the first layer for dense, or reads `mlp_layer_types`; vLLM reads this.
    explicit={"first_k_dense_replace": 1},
    experts=GLM4_MOE.experts,
    has_mla=True,
    rope=Rope(types=("default", "yarn")),  # vLLM always scales by yarn
    mtp=Mtp("num_nextn_predict_layers"),
    engines=Engines(
        vllm=Vllm(has_float32_router=True),
        sglang=Sglang(was_tried_in_groups=True, quantizes_latents=True),
    ),
)
