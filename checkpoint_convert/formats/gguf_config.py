"""Converts the metadata of a GGUF file to the config files of a Hugging Face folder.

transformers reads this metadata too, but drops the scaled RoPE of Llama 3, the head size of Qwen3,
the expert size and the experts of Mixtral; the defaults of its configs hide that on well-known
models.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from checkpoint_convert.config_values import number, positive
from checkpoint_convert.formats.gguf_file import ROPE_FACTORS, rope_factors
from checkpoint_convert.formats.gguf_header import GgufHeader
from checkpoint_convert.formats.gguf_tokenizer import token_id, write_tokenizer
from checkpoint_convert.formats.safetensors_file import TORCH_NAMES
from checkpoint_convert.hf_config import shape_of
from checkpoint_convert.shape import ModelShape

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# Metadata key without the architecture prefix -> key of config.json.
_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "expert_used_count": "num_experts_per_tok",
}
_OWN_KEYS = {
    "mixtral": {"expert_count": "num_local_experts"},
    "qwen3_moe": {
        "expert_count": "num_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
}
# Keys whose values are real numbers; the values of all other keys are sizes.
_REAL = ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor")
# Keys that are converted separately, or that the tensors make redundant.
_OTHER_KEYS = {
    "vocab_size",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "tensor_data_layout",
}
# If one of these is missing, transformers would use the default of some other model.
_REQUIRED = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)


def write_hf_config(gguf: Path, folder: Path) -> None:
    """Write config.json, generation_config.json and the tokenizer of a GGUF file into `folder`.

    The dtype is that of the matrices, or float32 if they are quantized or of several types. Raises
    ValueError, naming the key, for metadata that is missing, has the wrong type, or would change
    what the model computes but cannot be converted, and for an unsupported tokenizer.
    """
    import transformers  # noqa: PLC0415 - takes seconds, which other formats should not cost

    header = GgufHeader(gguf)
    config = _config(header)
    write_tokenizer(header, folder)
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    tokens = {role: token_id(header, name) for role, name in names.items()}
    ids = {f"{role}_token_id": index for role, index in tokens.items() if index is not None}
    transformers.AutoConfig.for_model(**config, **ids).save_pretrained(folder)
    # The end-of-turn and end-of-message tokens also end a generation.
    ends = [token_id(header, name) for name in ("eos", "eot", "eom")]
    known = sorted({index for index in ends if index is not None})
    generation = {**ids, "eos_token_id": known} if known else ids
    transformers.GenerationConfig(**generation).save_pretrained(folder)


def gguf_shape(gguf: Path) -> ModelShape:
    """Shape of the model from the metadata of a GGUF file, without its end tokens.

    Does not read the tokenizer, so an unsupported one is no error. Otherwise raises ValueError like
    `write_hf_config`.
    """
    return shape_of(gguf, _config(GgufHeader(gguf)))


def _config(header: GgufHeader) -> dict[str, Any]:
    values = {key: _shortest(value) for key, value in header.of_architecture().items()}
    # llama.cpp writes the size of a shared expert where config.json does, even if there is none.
    if values.get("expert_shared_feed_forward_length") == 0:
        del values["expert_shared_feed_forward_length"]
    model_type = {
        "llama": "mixtral" if "expert_count" in values else "llama",
        "qwen3moe": "qwen3_moe",
    }.get(header.architecture, header.architecture)
    own_keys = _OWN_KEYS.get(model_type, {})
    keys = {**_KEYS, **own_keys}
    of_experts = (*own_keys, "expert_used_count") if own_keys else ()
    _check_there(header, values, [*_REQUIRED, *of_experts])
    _check_known(header, values, {*keys, *_OTHER_KEYS, "attention.value_length"})
    config: dict[str, Any] = {
        name: _checked(header, key, values[key]) for key, name in keys.items() if key in values
    }
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    _check_head(header, values, config["head_dim"])
    if model_type == "qwen3_moe":
        config["norm_topk_prob"] = True  # llama.cpp always normalizes
    if model_type == "mixtral":
        config["sliding_window"] = None
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(f"{header.path} has no tensor token_embd.weight")
    matrices = {tensor.dtype for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return config | {
        "model_type": model_type,
        "architectures": [_CLASSES[model_type]],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _rope_parameters(header, values),
        "dtype": TORCH_NAMES[matrices.pop()] if len(matrices) == 1 else "float32",
    }


def _check_there(header: GgufHeader, values: dict[str, Any], keys: Iterable[str]) -> None:
    missing = [f"{header.architecture}.{key}" for key in keys if key not in values]
    if missing:
        raise ValueError(f"{header.path} has no {', '.join(missing)} in its metadata")


def _check_known(header: GgufHeader, values: dict[str, Any], known: set[str]) -> None:
    architecture = header.architecture
    unknown = [f"{architecture}.{key} = {values[key]}" for key in values if key not in known]
    unknown += [
        f"{architecture}.{key} = {value}" for key, value in values.items() if type(value) is list
    ]
    if unknown:
        raise ValueError(
            f"{header.path} has metadata that cannot be converted: {', '.join(unknown)}"
        )


def _checked(header: GgufHeader, key: str, value: Any) -> float:
    name = f"{header.architecture}.{key}"
    read = number if key in _REAL else positive
    return read(header.path, {name: value}, name)


def _check_head(header: GgufHeader, values: dict[str, Any], head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.get(key, head_dim) != head_dim:
            raise ValueError(
                f"{header.path}: {header.architecture}.{key} is {values[key]}, only the size of a "
                f"head ({head_dim}) is supported"
            )


def _rope_parameters(header: GgufHeader, values: dict[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": _checked(header, "rope.freq_base", values.get("rope.freq_base", 10000.0)),
    }
    kind = values.get("rope.scaling.type", "linear")  # llama.cpp's default for a bare factor
    if kind not in ("none", "linear"):
        raise ValueError(
            f"{header.path}: RoPE scaling {kind!r} is not supported; supported: 'none', 'linear', "
            f"and that of Llama 3, which is a tensor {ROPE_FACTORS}"
        )
    factor = values.get("rope.scaling.factor", 0.0) if kind == "linear" else 0.0
    is_linear = factor not in (0, 1)  # llama.cpp reads 0 as no factor
    if ROPE_FACTORS in header.tensors:  # `GgufTensors` checks all of them against this result
        if is_linear:
            raise ValueError(
                f"{header.path} scales RoPE twice, by a tensor {ROPE_FACTORS} and by "
                f"{header.architecture}.rope.scaling.factor = {factor}; one alone is supported"
            )
        return rope | {
            "rope_type": "llama3",
            "factor": _shortest(float(rope_factors(header).max())),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    if is_linear:
        factor = _checked(header, "rope.scaling.factor", factor)
        return rope | {"rope_type": "linear", "factor": factor}
    return rope


def _shortest(value: Any) -> Any:
    """A float as the shortest decimal with the same float32 value; files store float32."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
