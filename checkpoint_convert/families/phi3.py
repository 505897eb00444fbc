"""Phi-3 and Phi-4: Llama with fused matrices in the weight files.

Phi-3-mini-4k has a window of attention in every layer. Phi-4-mini and Phi-3's models for long
contexts scale RoPE by `longrope`, and Phi-4-mini rotates a part of each head. `yarn` is refused, as
transformers reads it as `longrope`.
"""

from checkpoint_convert.families.description import Family, Rope, Windows
from checkpoint_convert.families.engines import Engines, Sglang

PHI3 = Family(
    model_type="phi3",
    defaults={
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": 32000,
    },
    # vLLM runs Llama's class, with its switches.
    required={
        "attention_bias": False,
        "mlp_bias": False,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
    windows=Windows(),
    has_fused_weights=True,
    rope=Rope(partial_factor=None, types=("default", "longrope")),
    engines=Engines(sglang=Sglang(drops_scales=True)),
)
