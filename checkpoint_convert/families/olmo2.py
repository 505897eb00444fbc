"""OLMo-2: norms behind attention and MLP, and over all heads of queries and of keys together."""

from checkpoint_convert.families.description import Family, Norms

OLMO2 = Family(
    model_type="olmo2",
    defaults={
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": 50279,
    },
    # transformers puts `attention_bias` on the output projection too.
    required={"attention_bias": False, "sliding_window": None},
    norms=Norms(has_pre=False, has_post=True, of_heads=True, over_all_heads=True),
)
