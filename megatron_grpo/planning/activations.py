"""Bytes that layers keep for their backward, as Megatron-Core's modules do; estimates.

Counted are the tensors that autograd saves, module by module: of Transformer Engine's layers from
their documentation and source, of torch's by measurement (a test compares).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from checkpoint_convert import ModelShape
from megatron_grpo.config.config import Config
from megatron_grpo.planning.state import ITEMSIZE
from parallel import pipeline_layers
from parallel.tile_columns import tile_columns

DEFAULT_MODULES = ("core_attn",)
"""What Megatron-Core recomputes by `recompute_granularity: selective` alone."""


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Of one layer, per token of a context rank, for its backward."""

    kept: float
    """From the forward on."""
    recomputed: float
    """More for a moment, when the backward reaches the layer; 0 where nothing is recomputed."""


def layer_bytes(cfg: Config, shape: ModelShape) -> LayerBytes:
    """What a layer of `cfg` keeps, with its recomputation.

    `recompute_method: block` is counted as if its layers were spread evenly; of
    `recompute_modules` those that are not known here count as kept.
    """
    parts = _parts(cfg, shape)
    stored = sum(parts.values())
    settings = cfg.model.megatron
    entry = ITEMSIZE[cfg.model.dtype] * shape.hidden_size * _token_share(cfg)
    match settings.get("recompute_granularity"):
        case "full" if settings.get("recompute_method") == "uniform":
            layers = settings.get("recompute_num_layers") or 1
            return LayerBytes(kept=entry / layers, recomputed=stored * layers)
        case "full":
            chunks = pipeline_layers(shape.num_layers, cfg.dims)[0]
            share = min(1.0, (settings.get("recompute_num_layers") or 0) / len(chunks[0]))
            return LayerBytes(kept=share * entry + (1 - share) * stored, recomputed=stored)
        case "selective":
            again = [
                parts[name] - _entry_of(name, cfg, shape)
                for name in settings.get("recompute_modules") or DEFAULT_MODULES
                if name in parts
            ]
            return LayerBytes(kept=stored - sum(again), recomputed=max(again, default=0.0))
    return LayerBytes(kept=stored, recomputed=0.0)


def stage_activations(cfg: Config, shape: ModelShape, stage: int, microbatches: int) -> int:
    """Most bytes that a rank of a stage holds for backwards at once, the head apart.

    A microbatch has `train.max_tokens_per_microbatch`, and the stage as many of them as its
    schedule has under way (`in_flight`).
    """
    dims, layer = cfg.dims, layer_bytes(cfg, shape)
    tokens = cfg.train.max_tokens_per_microbatch / dims.context
    chunks = pipeline_layers(shape.num_layers, dims)[stage]
    under_way = in_flight(stage, dims.pipeline, dims.virtual_pipeline, microbatches)
    layers = sum(len(chunk) * count for chunk, count in zip(chunks, under_way, strict=True))
    entry = ITEMSIZE[cfg.model.dtype] * shape.hidden_size * _token_share(cfg)
    # An output is let go of once it is sent, but under a virtual pipeline.
    tensors = 0 if dims.pipeline == 1 else 1 if dims.virtual_pipeline == 1 else 2
    between = tensors * sum(under_way) * entry
    return round(tokens * (layers * layer.kept + layer.recomputed + between))


def forward_bytes(cfg: Config, shape: ModelShape) -> int:
    """What a forward without gradient has at once: a layer's tensors live until the next one's."""
    layer = layer_bytes(cfg, shape)
    tokens = cfg.train.max_tokens_per_microbatch / cfg.dims.context
    return round(tokens * max(layer.kept, layer.recomputed))


def head_bytes(cfg: Config, shape: ModelShape, *, backward: bool, device: str) -> int:
    """What log-probabilities work with on the last stage, as if every token were of a response.

    Hidden states, a copy of a rank's own and those of all tensor ranks, and a tile of logits, which
    `device` (`cpu` or `cuda`) has three times in float32 (parallel/logit_tiles.py); in the backward
    also what the norm before keeps, and both gradients: that to the hidden states in float32,
    beside the product of a tile that is added to it where its factors are narrower.
    """
    dims, itemsize, width = cfg.dims, ITEMSIZE[cfg.model.dtype], shape.hidden_size
    tokens = cfg.train.max_tokens_per_microbatch / dims.context
    columns = -(-shape.vocab_size // dims.tensor)
    tile = min(columns, tile_columns(round(tokens), width, columns, device))
    share = _token_share(cfg)
    rows = itemsize * width * (share if share == 1 else share + 1)
    forward = tokens * (rows + 3 * 4 * tile)
    if not backward:
        return round(forward)
    to_hidden = tokens * (4 if itemsize == 4 else 2 * 4) * width
    to_weight = itemsize * columns * width
    return round(forward + to_hidden + to_weight + tokens * final_norm_bytes(cfg, shape))


def final_norm_bytes(cfg: Config, shape: ModelShape) -> float:
    """What the norm before the head keeps, per token of a context rank; its output is not kept."""
    output = ITEMSIZE[cfg.model.dtype] * shape.hidden_size
    return (_norm(cfg, shape.hidden_size) - output) * _token_share(cfg)


def in_flight(stage: int, pipeline: int, virtual: int, microbatches: int) -> Sequence[int]:
    """Forwards of each model chunk of a stage that wait for their backward, at most.

    1F1B (Narayanan et al., arXiv 2104.04473): `pipeline` - `stage` microbatches. Interleaved: the
    forwards that Megatron-Core's schedule runs before its first backward, and one more.
    """
    if virtual == 1:
        return [min(microbatches, pipeline - stage)]
    ahead = (pipeline - stage - 1) * 2 + (virtual - 1) * pipeline + 1
    counts = [0] * virtual
    for number in range(min(ahead, microbatches * virtual)):
        counts[number // pipeline % virtual] += 1
    return counts


def _token_share(cfg: Config) -> float:
    """The part of the tokens that a tensor rank has between its matrices."""
    return 1 / cfg.dims.tensor if cfg.parallel.sequence_parallel else 1.0


def _uses_transformer_engine(cfg: Config) -> bool:
    """Whether a GPU's layers are Transformer Engine's, which takes types of 16 bits."""
    return ITEMSIZE[cfg.model.dtype] == 2 and cfg.model.megatron.get("transformer_impl") != "local"


def _is_fused(cfg: Config, fusion: str) -> bool:
    """Whether a fusion is on that `policy.transformer` has on with Transformer Engine's layers."""
    return bool(cfg.model.megatron.get(fusion, _uses_transformer_engine(cfg)))


def _norm(cfg: Config, width: float) -> float:
    """An RMS norm over rows of `width`: its input, its output, and a float32 per row.

    Torch's keeps input and normalized input in float32.
    """
    itemsize = ITEMSIZE[cfg.model.dtype]
    inner = itemsize if _uses_transformer_engine(cfg) else 8
    return (inner + itemsize) * width + 4


def _parts(cfg: Config, shape: ModelShape) -> dict[str, float]:
    """Bytes per token of a layer's parts, by Megatron-Core's names for `recompute_modules`."""
    itemsize = ITEMSIZE[cfg.model.dtype]
    norms = 2 * _norm(cfg, shape.hidden_size) * _token_share(cfg)
    outputs = 2 * itemsize * shape.hidden_size * _token_share(cfg)
    parts = {
        "layernorm": outputs,
        "norm inputs": norms - outputs,
        "core_attn": _core_attention(cfg, shape) / cfg.dims.tensor,
        "around attention": _around_attention(cfg, shape),
    }
    if shape.moe is None:
        parts["mlp"] = _gated(cfg, itemsize) * shape.intermediate_size / cfg.dims.tensor
    else:
        parts["moe"] = _experts(cfg, shape)
    return parts


def _core_attention(cfg: Config, shape: ModelShape) -> float:
    """Queries, keys, values, output and a float32 per row and head; of all tensor ranks together.

    Torch's computes in float32, gathers the keys of all context ranks, and copies the output into
    the weights' type; Transformer Engine's passes the keys of other ranks around a ring.
    """
    itemsize = ITEMSIZE[cfg.model.dtype]
    query = shape.num_attention_heads * shape.head_dim
    key = shape.num_key_value_heads * shape.head_dim
    if _uses_transformer_engine(cfg):
        return itemsize * (2 * query + 2 * key) + 4 * shape.num_attention_heads
    context = cfg.dims.context
    # In float32 and alone, values are a view that holds on to queries and keys as well.
    view = query + key if itemsize == 4 and context == 1 else 0
    inner = 4 * (2 * query + 2 * key * context + view)
    return inner + 4 * shape.num_attention_heads + itemsize * query


def _around_attention(cfg: Config, shape: ModelShape) -> float:
    """Norms of queries and keys, and the four tables of a RoPE that is not fused."""
    itemsize = ITEMSIZE[cfg.model.dtype]
    fused = _is_fused(cfg, "apply_rope_fusion")
    tables = 0.0 if fused else 4.0 * shape.head_dim * itemsize
    if not shape.qk_norm:
        return tables
    heads = shape.num_attention_heads + shape.num_key_value_heads
    norms = heads * (_norm(cfg, shape.head_dim) - itemsize * shape.head_dim)
    return tables + norms / cfg.dims.tensor


def _gated(cfg: Config, itemsize: int) -> float:
    """Of a gated MLP, per intermediate element: both halves, and what is computed of them.

    Without fusion that is the activated half, the other once more, and their product.
    """
    return itemsize * (3 if _is_fused(cfg, "bias_activation_fusion") else 5)


def _experts(cfg: Config, shape: ModelShape) -> float:
    """Router, permuted tokens and experts, where every expert gets as many tokens."""
    moe, itemsize = shape.moe, ITEMSIZE[cfg.model.dtype]
    assert moe is not None
    router = 5 * moe.num_experts + 20 * moe.experts_per_token
    # The ranks of one expert's matrices have the tokens of all of them, each with its float32
    # probability, and a part of the columns.
    tokens = (itemsize * shape.hidden_size + 4) * cfg.dims.expert_tensor
    weighed = 0 if _is_fused(cfg, "bias_activation_fusion") else itemsize
    columns = (_gated(cfg, itemsize) + weighed) * moe.intermediate_size
    return (router + moe.experts_per_token * (tokens + columns)) * _token_share(cfg)


def _entry_of(module: str, cfg: Config, shape: ModelShape) -> float:
    """What a recomputed module keeps of its input that no other part counts."""
    if module != "core_attn":
        return 0.0
    width = shape.head_dim * (shape.num_attention_heads + 2 * shape.num_key_value_heads)
    output = shape.head_dim * shape.num_attention_heads
    queries_and_keys = shape.head_dim * (shape.num_attention_heads + shape.num_key_value_heads)
    # Values are a view of queries, keys and values together.
    inputs = queries_and_keys + width
    return ITEMSIZE[cfg.model.dtype] * (inputs + output) / cfg.dims.tensor
