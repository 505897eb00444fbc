"""Qwen2 and Qwen2.5: Llama with a bias on the query, key and value projections."""

from checkpoint_convert.families.description import Family

QWEN2 = Family(
    model_type="qwen2",
    defaults={
        "num_key_value_heads": 32,
        "head_dim": None,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": None,
    },
    # Only vLLM reads `qk_norm`.
    required={"use_sliding_window": False, "qk_norm": False},
    attention_bias=True,
)
