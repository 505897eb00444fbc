"""Qwen2 and Qwen2.5: Llama with a bias on the query, key and value projections."""

from checkpoint_convert.families.description import Family, Windows
from checkpoint_convert.families.engines import Engines, Vllm

QWEN2 = Family(
    model_type="qwen2",
    defaults={
        "num_key_value_heads": 32,
        "head_dim": None,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    # Only vLLM reads `qk_norm`.
    required={"qk_norm": False},
    attention_bias=True,
    windows=Windows(
        switch="use_sliding_window",
        first="max_window_layers",
        are_by_layer_types=True,
    ),
    engines=Engines(vllm=Vllm(has_mixed_windows=False)),
)
