"""Ministral 3, text only: Mistral whose RoPE is scaled by YaRN.

From `original_max_position_embeddings` on, transformers scales queries by their positions, which
vLLM does not for a config of transformers: see `rope.num_positions`.
"""

from checkpoint_convert.families.description import Family, Windows
from checkpoint_convert.families.mistral import MISTRAL

MINISTRAL3 = Family(
    model_type="ministral3",
    defaults={
        **MISTRAL.defaults,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    required=MISTRAL.required,
    windows=Windows(),
    engines=MISTRAL.engines,
)
