"""Llama 1 to 3.x and models of the same architecture, such as SmolLM2."""

from checkpoint_convert.families.description import Family
from checkpoint_convert.families.engines import Engines, Sglang

LLAMA = Family(
    model_type="llama",
    defaults={
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "attention_bias": False,
    },
    # transformers gives `sliding_window` to the cache, not to the model.
    required={"mlp_bias": False, "sliding_window": None},
    attention_bias="attention_bias",
    has_output_bias=True,
    engines=Engines(sglang=Sglang(drops_scales=True)),
)
