"""Qwen3 with experts, such as Qwen3-30B-A3B, and the text of Qwen3-VL-30B-A3B."""

from checkpoint_convert.families.description import Experts, Family, Norms, Windows
from checkpoint_convert.families.engines import Engines, Sglang

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    defaults={
        "num_key_value_heads": 4,
        "head_dim": None,
        "intermediate_size": 6144,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    # vLLM drops `attention_bias` of the output projection, and alone knows a shared expert.
    required={"attention_bias": False, "shared_expert_intermediate_size": 0},
    norms=Norms(of_heads=True),
    windows=Windows(switch="use_sliding_window"),
    experts=Experts(
        num_experts="num_experts",
        intermediate_size="moe_intermediate_size",
        normalize_topk="norm_topk_prob",
        dense_layers="mlp_only_layers",
        every="decoder_sparse_step",
        tower_stacks="transposed",
    ),
    engines=Engines(sglang=Sglang(was_tried_in_groups=True, has_dense_layers=False)),
)
