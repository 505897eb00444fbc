"""Mistral: Llama; 7B v0.1 has a window of attention in every layer."""

from checkpoint_convert.families.description import Family, Windows
from checkpoint_convert.families.engines import Engines, Sglang

MISTRAL = Family(
    model_type="mistral",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "sliding_window": 4096,
    },
    # vLLM has one class for Llama and Mistral, with the switches of both.
    required={
        "attention_bias": False,
        "mlp_bias": False,
        "llama_4_scaling": None,
        "ada_rms_norm_t_cond": False,
    },
    windows=Windows(),
    engines=Engines(sglang=Sglang(drops_scales=True)),
)
