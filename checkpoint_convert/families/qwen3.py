"""Qwen3, dense: Llama with an RMS norm on every query and key head, and an explicit head size."""

from checkpoint_convert.families.description import Family, Windows

QWEN3 = Family(
    model_type="qwen3",
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    # transformers puts `attention_bias` on the output projection too.
    required={"attention_bias": False},
    qk_norm=True,
    windows=Windows(
        switch="use_sliding_window",
        first="max_window_layers",
        are_by_layer_types=True,
        are_mixed_in_engine=False,
    ),
)
