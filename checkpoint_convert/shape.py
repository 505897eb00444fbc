"""The numbers that define a dense decoder-only model, whatever its family."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallel import ParallelDims, divisors, pipeline_layers


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a model computes apart from its weights; sizes count elements of the whole model."""

    family: str
    """Name in `families.FAMILIES`, which is the `model_type` of config.json."""
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Size of one head; heads * head_dim need not be `hidden_size`."""
    intermediate_size: int
    vocab_size: int
    """Rows of the embedding in the weight files, without padding."""
    tie_word_embeddings: bool
    attention_bias: bool
    """Bias on the query, key and value projections, never on the output projection."""
    qk_norm: bool
    """RMS norm over `head_dim` on every query and key head."""
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    """None, or the `rope_type` and the parameters of a scaled RoPE, named as in config.json."""
    rms_norm_eps: float
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]


def padded_vocab_size(shape: ModelShape, dims: ParallelDims) -> int:
    """Rows of the embedding over all tensor ranks: the next multiple of their number."""
    return -(-shape.vocab_size // dims.tensor) * dims.tensor


def check_divisible(shape: ModelShape, dims: ParallelDims) -> None:
    """Raise ValueError, with the legal sizes, when `dims` cannot split the model."""
    pipeline_layers(shape.num_layers, dims)
    if dims.expert > 1:
        raise ValueError(f"expert({dims.expert}) splits experts, {shape.family} has none: set 1")
    obstacles = _obstacles(shape, dims.tensor)
    if obstacles:
        candidates = divisors(shape.num_attention_heads)
        legal = [size for size in candidates if not _obstacles(shape, size)]
        raise ValueError(
            f"tensor({dims.tensor}) cannot split the model: it "
            + " and ".join(obstacles)
            + f"; legal values are {legal}"
        )


def _obstacles(shape: ModelShape, tensor: int) -> list[str]:
    """Why Megatron-Core cannot split the model over `tensor` ranks.

    With fewer key-value heads than ranks it cuts the rows of the fused QKV projection into equal
    shares all the same, wherever the cuts fall, and gathers the output of the projection.
    """
    kv_heads = shape.num_key_value_heads
    qkv_rows = (shape.num_attention_heads + 2 * kv_heads) * shape.head_dim
    obstacles = [
        f"does not divide {name}({size})"
        for name, size in {
            "num_attention_heads": shape.num_attention_heads,
            "intermediate_size": shape.intermediate_size,
            "rows of the fused QKV projection": qkv_rows,
        }.items()
        if size % tensor
    ]
    if kv_heads % tensor and tensor % kv_heads:
        obstacles.append(f"is neither a divisor nor a multiple of num_key_value_heads({kv_heads})")
    return obstacles
