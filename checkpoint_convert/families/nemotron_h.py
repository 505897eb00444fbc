"""Nemotron-H and Nemotron 3 Nano: layers of one module each, most of them Mamba-2's or experts.

transformers lets no step of Mamba-2 be below `time_step_min`. vLLM and Megatron-Core have no such
limit, nor have we; values above those of published models are refused.
"""

from checkpoint_convert.families.description import Experts, Family, Rope
from checkpoint_convert.families.engines import Engines, Vllm

NEMOTRON_H = Family(
    model_type="nemotron_h",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "time_step_min": 1e-3,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    # Only Nemotron 3 Super has latent experts and layers for multi-token prediction. Megatron-Core
    # always scales sigmoid scores to sum to 1. vLLM never ties the head and has no biases in
    # attention; it alone multiplies the shared expert's size by `n_shared_experts`. transformers
    # alone reads the last three, as `n_groups`, `conv_kernel` and `use_conv_bias`.
    required={
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "use_bias": False,
        "mamba_proj_bias": False,
        "use_conv_bias": True,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "residual_in_fp32": False,
        "sliding_window": None,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "moe_latent_size": None,
        "num_nextn_predict_layers": 0,
        "block_configs": None,  # layers of several sizes
        "mamba_n_groups": None,
        "mamba_d_conv": None,
        "mamba_conv_bias": None,
    },
    activation="relu2",
    rope=Rope(partial_factor=0.0),
    experts=Experts(
        num_experts="n_routed_experts",
        intermediate_size="moe_intermediate_size",
        normalize_topk="norm_topk_prob",
        block="mixer",
        score_function="sigmoid",
        weight_scale="routed_scaling_factor",
        shared_size="moe_shared_expert_intermediate_size",
        has_groups=True,
    ),
    linear="mamba",
    has_block_types=True,
    file_names={
        "model.embed_tokens": "backbone.embeddings",
        "model.layers": "backbone.layers",
        "model.norm": "backbone.norm_f",
    },
    engines=Engines(
        vllm=Vllm(
            names={
                "backbone.embeddings": "model.embed_tokens",
                "backbone.": "model.",
                ".A_log": ".A",
            },
            has_whole_shared_expert=True,
        )
    ),
)
