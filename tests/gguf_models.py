"""Writes GGUF files like those of llama.cpp's converter, from tiny Hugging Face folders."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel

F32, F16, BF16, Q8_0, Q4_0 = (
    gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0")
)
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
WHOLE_MODEL = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
IN_A_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
EXPERT_PARTS = {
    "gate_proj": "ffn_gate_exps",
    "w1": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "w3": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w2": "ffn_down_exps",
}


def write_gguf(
    path: Path,
    model: Path,
    *,
    kind: Callable[[str], gguf.GGMLQuantizationType] = lambda name: F32,
    metadata: Mapping[str, Any] | None = None,
    edit: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
) -> Path:
    """Write the model in folder `model`; `kind` gives the type of a tensor of 2 dimensions or more.

    `metadata` replaces or adds keys; the value None omits a key. `edit` may change the tensors.
    """
    config = json.loads((model / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    tensors = gguf_tensors(model, config)
    edit(tensors)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**model_metadata(config, architecture), **(metadata or {})}.items():
        if value is not None:
            add(writer, key, value)
    for name, values in tensors.items():
        stored_as = kind(name) if values.ndim > 1 else F32
        writer.add_tensor(name, gguf.quantize(values, stored_as), raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    adders[type(value)](key, value)


def model_metadata(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    rope = config["rope_parameters"]
    own = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(rope["rope_theta"]),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_count": config.get("num_local_experts", config.get("num_experts")),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
    }
    if architecture == "llama":
        own["vocab_size"] = config["vocab_size"]
        own["rope.dimension_count"] = config["head_dim"]
    return {
        **{f"{architecture}.{key}": value for key, value in own.items()},
        **byte_tokenizer(config["vocab_size"]),
    }


def byte_tokenizer(vocab_size: int) -> dict[str, Any]:
    """Metadata of a tokenizer: two special tokens, 240 of the 256 bytes, one merge, and unused
    tokens up to `vocab_size`."""
    byte_tokens = sorted(ByteLevel.alphabet())[:240]
    tokens = ["<pad>", "<eos>", *byte_tokens, "".join(byte_tokens[:2])]
    unused = [f"[PAD{i}]" for i in range(len(tokens), vocab_size)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens + unused,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 2), *[5] * len(unused)],
        "tokenizer.ggml.merges": [f"{byte_tokens[0]} {byte_tokens[1]}"],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
    }


def gguf_tensors(model: Path, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of folder `model` with llama.cpp's names and order of rows."""
    tensors: dict[str, Any] = {}
    for name, values in sorted(load_file(model / "model.safetensors").items()):
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            index, part, _ = after.split(".")
            stack = f"blk.{before.split('.')[2]}.{EXPERT_PARTS[part]}.weight"
            tensors.setdefault(stack, {})[int(index)] = values
        else:
            tensors[gguf_name(name)] = values
    for name, values in tensors.items():
        if isinstance(values, dict):
            tensors[name] = torch.stack([values[index] for index in range(len(values))])
        elif ARCHITECTURES[config["model_type"]] == "llama" and ".attn_q." in name:
            tensors[name] = in_pairs(values, config["num_attention_heads"])
        elif ARCHITECTURES[config["model_type"]] == "llama" and ".attn_k." in name:
            tensors[name] = in_pairs(values, config["num_key_value_heads"])
    return {name: values.float().numpy() for name, values in tensors.items()}


def gguf_name(name: str) -> str:
    base, _, suffix = name.rpartition(".")
    if base in WHOLE_MODEL:
        return f"{WHOLE_MODEL[base]}.{suffix}"
    _, _, layer, part = base.split(".", 3)
    return f"blk.{layer}.{IN_A_LAYER[part]}.{suffix}"


def in_pairs(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp's `permute`: interleave the two halves of a head into pairs of rows."""
    heads = values.reshape(num_heads, 2, len(values) // num_heads // 2, *values.shape[1:])
    return heads.swapaxes(1, 2).reshape(values.shape)
