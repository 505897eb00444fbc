"""Qwen3, dense: Llama with an RMS norm on every query and key head, and an explicit head size."""

from checkpoint_convert.families.description import Family

QWEN3 = Family(
    model_type="qwen3",
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": None,
    },
    # transformers puts `attention_bias` on the output projection too.
    required={"attention_bias": False, "use_sliding_window": False},
    qk_norm=True,
)
