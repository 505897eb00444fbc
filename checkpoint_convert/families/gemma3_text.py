"""Gemma 3: norms on both sides of attention and MLP, and windows in most layers, with two RoPEs.

Norms multiply by 1 + weight, and embeddings are scaled.
"""

from checkpoint_convert.families.description import Family, Norms, Windows
from checkpoint_convert.families.engines import Engines, Sglang

GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    defaults={
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    # `parallel/logprobs.py` knows no softcapping of logits.
    required={
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    norms=Norms(has_post=True, of_heads=True, is_zero_centered=True),
    scales_embeddings=True,
    activation="gelu_pytorch_tanh",
    query_scale="query_pre_attn_scalar",
    windows=Windows(
        every="sliding_window_pattern",
        are_by_layer_types=True,
        rope_theta=(1e6, 1e4),
        rope_theta_key="rope_local_base_freq",
    ),
    engines=Engines(sglang=Sglang(has_windows=True, has_whole_embedding=True)),
)
