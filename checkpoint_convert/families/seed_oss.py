"""Seed-OSS: Llama with a bias on the query, key and value projections."""

from checkpoint_convert.families.description import Family

SEED_OSS = Family(
    model_type="seed_oss",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
    },
    required={
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "sliding_window": None,
        "residual_dropout": 0.0,
    },
    attention_bias=True,
)
