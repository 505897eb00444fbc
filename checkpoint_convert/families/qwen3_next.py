"""Qwen3-Next: linear attention in three of four layers, output gates in the others, many experts.

One of the experts is shared, and has a gate, too.
"""

from checkpoint_convert.families.description import Experts, Family, Mtp, Norms, Rope
from checkpoint_convert.families.engines import Engines, Sglang, Vllm

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

SGLANG_NAMES = {".self_attn.": "."}

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
    norms=Norms(of_heads=True, is_zero_centered=True),
    has_output_gate=True,
    linear="by head",
    rope=Rope(partial_factor=0.25),
    experts=Experts(
        num_experts="num_experts",
        intermediate_size="moe_intermediate_size",
        normalize_topk="norm_topk_prob",
        shared="shared_expert",
        shared_size="shared_expert_intermediate_size",
        has_shared_gate=True,
    ),
    mtp=Mtp("num_nextn_predict_layers", is_apart=True),
    engines=Engines(
        vllm=Vllm(has_whole_shared_expert=True),
        sglang=Sglang(names=SGLANG_NAMES, follows_stored_dtype=True),
    ),
)
