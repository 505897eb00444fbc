"""Mixtral: Mistral with experts."""

from checkpoint_convert.families.description import Experts, Family, Windows

MIXTRAL = Family(
    model_type="mixtral",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    # The jitter is noise on the router's input during training.
    required={"router_jitter_noise": 0.0},
    windows=Windows(),
    experts=Experts(
        num_experts="num_local_experts",
        intermediate_size="intermediate_size",
        normalize_topk=None,
        block="block_sparse_moe",
        gate="w1",
        up="w3",
        down="w2",
    ),
)
