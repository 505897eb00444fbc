"""GLM-5: DeepSeek-V3.2 without groups of experts, whose indexer rotates neighbours."""

from dataclasses import replace

from checkpoint_convert.families.deepseek_v32 import DEEPSEEK_V32

GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    model_type="glm_moe_dsa",
    defaults={
        **DEEPSEEK_V32.defaults,
        "num_key_value_heads": 64,
        "intermediate_size": 12288,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
    },
    required={
        key: value
        for key, value in DEEPSEEK_V32.required.items()
        if key != "indexer_rope_interleave"
    },
    # transformers always rotates neighbours.
    explicit={**DEEPSEEK_V32.explicit, "indexer_rope_interleave": True},
    indexer_pairs="neighbours",
)
