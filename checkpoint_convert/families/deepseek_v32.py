"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention, whose indexer rotates halves.

Models whose layers reuse the tokens that an earlier layer's indexer chose (IndexCache, arXiv
2603.12201) are refused.
"""

from dataclasses import replace

from checkpoint_convert.families.deepseek_v3 import DEEPSEEK_V3

DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    defaults={
        **DEEPSEEK_V3.defaults,
        "max_position_embeddings": 163840,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 64,
    },
    # vLLM and SGLang read the last three; transformers reads `index_topk_freq`, for GLM-5.
    required={
        **{key: value for key, value in DEEPSEEK_V3.required.items() if key != "index_topk"},
        "mlp_bias": False,
        "index_topk_freq": 1,
        "index_topk_pattern": None,
        "indexer_rope_interleave": False,
    },
    indexer_pairs="halves",
)
