"""config.json of published models, for planning runs without their weights."""

import json
from pathlib import Path
from typing import Any

_LLAMA_3 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
_QWEN_3 = {
    "vocab_size": 151936,
    "head_dim": 128,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_GLM_4_5 = {
    "model_type": "glm4_moe",
    "vocab_size": 151552,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "max_position_embeddings": 131072,
    "attention_bias": True,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "eos_token_id": [151329, 151336, 151338],
    "pad_token_id": 151329,
}
PUBLISHED_MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "model_type": "llama",
        "vocab_size": 49152,
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "Llama-3.1-8B": _LLAMA_3
    | {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
    },
    "Llama-3.3-70B": _LLAMA_3
    | {
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "head_dim": 128,
    },
    "Llama-3.1-405B": _LLAMA_3
    | {
        "num_hidden_layers": 126,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_attention_heads": 128,
    },
    "Qwen2.5-72B": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 131072,
        "max_window_layers": 70,
        "tie_word_embeddings": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "DeepSeek-R1-Distill-Qwen-32B": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 131072,
        "use_sliding_window": False,
        "sliding_window": 131072,
        "max_window_layers": 64,
        "tie_word_embeddings": False,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
    },
    "Qwen3-32B": _QWEN_3
    | {
        "model_type": "qwen3",
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "Qwen3-30B-A3B": _QWEN_3
    | {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "Qwen3-235B-A22B": _QWEN_3
    | {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "GLM-4.5-Air": _GLM_4_5
    | {
        "num_hidden_layers": 46,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "use_qk_norm": False,
        "n_routed_experts": 128,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
    },
    "GLM-4.5": _GLM_4_5
    | {
        "num_hidden_layers": 92,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "use_qk_norm": True,
        "n_routed_experts": 160,
        "moe_intermediate_size": 1536,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
    },
}


def write_config(folder: Path, name: str, **differing: Any) -> Path:
    """Create `folder` and write the config.json of a published model there; returns the folder.

    `differing` overrides keys.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(PUBLISHED_MODELS[name] | differing))
    return folder
