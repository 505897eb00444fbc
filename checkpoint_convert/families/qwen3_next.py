"""Qwen3-Next: linear attention in three of four layers, gates after the others, and many experts.

Of these one is shared, and has a gate, too.
"""

from checkpoint_convert.families.description import Experts, Family

LINEAR_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "full_attention_interval": 4,
    "layer_types": None,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    defaults={
        **LINEAR_DEFAULTS,
        "num_attention_heads": 16,
        "intermediate_size": 5632,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_nextn_predict_layers": 1,
    },
    # vLLM never ties the head, and alone reads the last two.
    required={
        "tie_word_embeddings": False,
        "attention_bias": False,
        "sliding_window": None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attn_output_gate": True,
        "layer_scale": False,
    },
    qk_norm=True,
    zero_centered_norms=True,
    has_output_gate=True,
    linear="by head",
    partial_rotary_factor=0.25,
    experts=Experts(
        num_experts="num_experts",
        intermediate_size="moe_intermediate_size",
        normalize_topk="norm_topk_prob",
        shared="shared_expert",
        shared_size="shared_expert_intermediate_size",
        has_shared_gate=True,
        is_shared_whole_in_engine=True,
    ),
    num_mtp_layers="num_nextn_predict_layers",
    has_mtp_apart=True,
)
