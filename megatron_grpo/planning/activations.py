"""Estimates the bytes that Megatron-Core's layers keep for their backward.

Counts the tensors that autograd saves, module by module: for Transformer Engine's layers from their
documentation and source, for torch's by measurement (a test compares). Layers that are alike are
counted once, and parts that run a second time in the backward keep less.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import mul

from checkpoint_convert import ModelShape
from megatron_grpo.config.config import Config
from megatron_grpo.planning import fp8
from megatron_grpo.planning.attention import kept_bytes
from megatron_grpo.planning.card import ITEMSIZE
from megatron_grpo.planning.workload import in_flight
from parallel import pipeline_layers
from parallel.tiles import tile_columns

DEFAULT_MODULES = ("core_attn",)
"""Modules that Megatron-Core recomputes with `recompute_granularity: selective` and no list."""


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Bytes of one layer for its backward, per token of a context rank."""

    kept: float
    """Kept on the GPU from the forward on."""
    recomputed: float
    """Additional bytes while the layer's backward runs; 0 without recomputation."""
    offloaded: float = 0.0
    """Kept in the memory of the host: `fine_grained_activation_offloading`."""


def layer_bytes(cfg: Config, shape: ModelShape) -> LayerBytes:
    """Bytes that a layer keeps under the recomputation of `cfg`; all of `shape` are of one kind.

    `recompute_method: block` is counted as if its layers were spread evenly, and all chunks as long
    as the longest. Unknown entries of `recompute_modules` count as kept.
    """
    parts = _parts(cfg, shape)
    stored = sum(parts.values())
    settings = cfg.model.megatron
    entry = row_bytes(cfg, shape)
    match settings.get("recompute_granularity"):
        case "full" if settings.get("recompute_method") == "uniform":
            layers = settings.get("recompute_num_layers") or 1
            return LayerBytes(kept=entry / layers, recomputed=stored * layers)
        case "full":
            stages = pipeline_layers(shape.num_layers, cfg.dims)
            longest = max(len(chunk) for chunks in stages for chunk in chunks)
            share = min(1.0, (settings.get("recompute_num_layers") or 0) / longest)
            return LayerBytes(kept=share * entry + (1 - share) * stored, recomputed=stored)
        case "selective":
            modules = settings.get("recompute_modules") or DEFAULT_MODULES
            if "moe" in modules and "shared_experts" in parts:  # a part of it
                parts["moe"] += parts.pop("shared_experts")
            again = [parts[name] - _entry_of(name, cfg, shape) for name in modules if name in parts]
            kept, recomputed = stored - sum(again), max(again, default=0.0)
        case _:
            kept, recomputed = stored, 0.0
    offloaded = _offloaded(cfg, shape)
    return LayerBytes(kept=kept - offloaded, recomputed=recomputed, offloaded=offloaded)


def stage_activations(cfg: Config, shape: ModelShape, stage: int, microbatches: int) -> int:
    """Peak bytes that a rank of a stage holds for backwards, without the head.

    Each microbatch has `train.max_tokens_per_microbatch` tokens, and the stage holds as many as its
    schedule has in flight (`in_flight`).
    """
    dims = cfg.dims
    kept = recomputed = leaving = 0.0
    for layer, num_layers in _held_layers(cfg, shape, stage, microbatches):
        kept += layer.kept * num_layers
        recomputed = max(recomputed, layer.recomputed)
        # What leaves in one layer is free once that of the next has left.
        leaving = max(leaving, layer.offloaded * min(2, num_layers))
    # A chunk keeps its input; its output is freed once it is sent.
    forwards = in_flight(stage, dims.pipeline, dims.virtual_pipeline, microbatches)
    between = sum(forwards) * row_bytes(cfg, shape) if dims.pipeline > 1 else 0
    tokens = cfg.train.max_tokens_per_microbatch / dims.context
    return round(tokens * (kept + recomputed + leaving + between))


def offloaded_bytes(cfg: Config, shape: ModelShape, stage: int, microbatches: int) -> int:
    """Bytes that a rank of a stage holds in the memory of its host for backwards, at the peak."""
    layers = _held_layers(cfg, shape, stage, microbatches)
    per_token = sum(layer.offloaded * num_layers for layer, num_layers in layers)
    return round(cfg.train.max_tokens_per_microbatch / cfg.dims.context * per_token)


def _held_layers(
    cfg: Config, shape: ModelShape, stage: int, microbatches: int
) -> Iterator[tuple[LayerBytes, int]]:
    """For each kind of a stage's layers, how many forwards of one it holds at the peak."""
    dims = cfg.dims
    forwards = in_flight(stage, dims.pipeline, dims.virtual_pipeline, microbatches)
    chunks = pipeline_layers(shape.num_layers, dims)[stage]
    for config, kind in fp8.kinds_of_stage(cfg, shape, stage):
        yield layer_bytes(config, kind.shape), sum(map(mul, map(kind.count_in, chunks), forwards))


def forward_bytes(cfg: Config, shape: ModelShape, stage: int) -> int:
    """Peak bytes of a stage's forward without gradients.

    A layer's tensors live until the next layer's. Inputs in FP8 are there beside those in bfloat16
    for one product: not counted.
    """
    plain = fp8.without_fp8(cfg)
    layers = [layer_bytes(plain, kind.shape) for _, kind in fp8.kinds_of_stage(plain, shape, stage)]
    tokens = cfg.train.max_tokens_per_microbatch / cfg.dims.context
    # Without gradients nothing leaves.
    return round(tokens * max(max(each.kept + each.offloaded, each.recomputed) for each in layers))


def head_bytes(cfg: Config, shape: ModelShape, *, backward: bool, device: str) -> int:
    """Peak bytes of log-probabilities on the last stage, as if every token were of a response.

    Counts the hidden states (a copy of the rank's own and, with sequence parallelism, those of all
    tensor ranks) and three float32 copies of a tile of logits, whose width depends on `device`
    (`cpu` or `cuda`; parallel/logit_tiles.py). The backward adds what the final norm keeps and both
    gradients, of a frozen head only that of the hidden states. This one is float32; if its factors
    are narrower, the product of a tile is held next to it before it is added.
    """
    dims, itemsize, width = cfg.dims, ITEMSIZE[cfg.model.dtype], shape.hidden_size
    tokens = cfg.train.max_tokens_per_microbatch / dims.context
    columns = -(-shape.vocab_size // dims.tensor)
    tile = min(columns, tile_columns(round(tokens), width, columns, device))
    share = token_share(cfg)
    rows = itemsize * width * (share if share == 1 else share + 1)
    forward = tokens * (rows + 3 * 4 * tile)
    if not backward:
        return round(forward)
    to_hidden = tokens * (4 if itemsize == 4 else 2 * 4) * width
    to_weight = 0 if cfg.lora.r else itemsize * columns * width
    return round(forward + to_hidden + to_weight + tokens * final_norm_bytes(cfg, shape))


def final_norm_bytes(cfg: Config, shape: ModelShape) -> float:
    """Bytes that the norm before the head keeps per token of a context rank, without its output."""
    output = ITEMSIZE[cfg.model.dtype] * shape.hidden_size
    return (_norm(cfg, shape.hidden_size) - output) * token_share(cfg)


def token_share(cfg: Config) -> float:
    """Fraction of the tokens that a tensor rank holds outside of its split matrices."""
    return 1 / cfg.dims.tensor if cfg.parallel.sequence_parallel else 1.0


def row_bytes(cfg: Config, shape: ModelShape) -> float:
    """Bytes of hidden states, per token of a context rank."""
    return ITEMSIZE[cfg.model.dtype] * shape.hidden_size * token_share(cfg)


def uses_transformer_engine(cfg: Config) -> bool:
    """Whether layers on a GPU are Transformer Engine's, which requires 16-bit dtypes."""
    return ITEMSIZE[cfg.model.dtype] == 2 and cfg.model.megatron.get("transformer_impl") != "local"


def _is_fused(cfg: Config, fusion: str) -> bool:
    """Whether a fusion is on; `policy.transformer` turns it on for Transformer Engine's layers."""
    return bool(cfg.model.megatron.get(fusion, uses_transformer_engine(cfg)))


def _norm(cfg: Config, width: float) -> float:
    """Bytes of an RMS norm over rows of `width`: its input, its output, and a float32 per row.

    torch's norm keeps the input and the normalized input in float32.
    """
    itemsize = ITEMSIZE[cfg.model.dtype]
    inner = itemsize if uses_transformer_engine(cfg) else 8
    return (inner + itemsize) * width + 4


def _parts(cfg: Config, shape: ModelShape) -> dict[str, float]:
    """Bytes per token of a layer's parts, by Megatron-Core's names for `recompute_modules`."""
    itemsize = ITEMSIZE[cfg.model.dtype]
    modules = shape.modules(0)
    places = len(modules) * (shape.has_pre_norms + shape.has_post_norms)
    norms = places * _norm(cfg, shape.hidden_size) * token_share(cfg)
    # Transformer Engine fuses a norm into the linear after it, which keeps its output; only the
    # norms before a mixture and before latent attention are modules of their own, whose output
    # Megatron can recompute.
    alone = (shape.moe is not None) + (shape.latent is not None)
    separate = alone if uses_transformer_engine(cfg) else len(modules)
    outputs = separate * itemsize * shape.hidden_size * token_share(cfg)
    less = fp8.less_of_inputs(cfg) * (len(modules) - separate) * shape.hidden_size
    parts = {
        "layernorm": outputs,
        "norms": norms - outputs - less * token_share(cfg),
        **_attention(cfg, shape),
    }
    if fp8.has_fp8(cfg) and shape.latent is not None:  # two projections keep their own input each
        twice = 2 * fp8.input_itemsize(cfg) - itemsize
        parts["layernorm"] += twice * shape.hidden_size * token_share(cfg)
    if "mlp" in modules:
        parts["mlp"] = _inner(cfg, shape) * shape.intermediate_size / cfg.dims.tensor
    if shape.moe is not None:
        parts["moe"] = _experts(cfg, shape)
        columns = shape.moe.shared_intermediate_size / cfg.dims.tensor
        parts["shared_experts"] = _inner(cfg, shape) * columns
        if shape.moe.has_shared_gate:  # what is multiplied by a sigmoid, and that
            parts["shared_experts"] += itemsize * (shape.hidden_size + 1) * token_share(cfg)
    return parts


def _attention(cfg: Config, shape: ModelShape) -> dict[str, float]:
    """The parts before the MLP, without the norms of hidden states."""
    itemsize, tensor = ITEMSIZE[cfg.model.dtype], cfg.dims.tensor
    if shape.linear is not None:
        split, whole = kept_bytes(shape.linear, cfg.dims.context)
        output = fp8.input_itemsize(cfg) * shape.linear.num_value_heads * shape.linear.value_dim
        return {"linear attention": (split + output) / tensor + whole}
    if "attention" not in shape.modules(0):
        return {}
    parts = {
        "core_attn": _core_attention(cfg, shape) / tensor,
        "around attention": _around_attention(cfg, shape),
    }
    if shape.has_output_gate:  # a sigmoid in float32, and its product with the attention's output
        width = shape.num_attention_heads * shape.value_dim
        parts["around attention"] += (4 + itemsize) * width / tensor
    return parts


def _core_attention(cfg: Config, shape: ModelShape) -> float:
    """Queries, keys, values, output and a float32 per row and head, summed over tensor ranks.

    torch's attention computes in float32, gathers the keys of all context ranks, and copies the
    output to the dtype of the weights; Transformer Engine's passes keys of other ranks around a
    ring.
    """
    itemsize = ITEMSIZE[cfg.model.dtype]
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    query, key = heads * shape.head_dim, kv_heads * shape.head_dim
    value, output = kv_heads * shape.value_dim, heads * shape.value_dim
    if shape.indexer is not None:  # and the tokens that an indexer chose, on every tensor rank
        wide = itemsize if uses_transformer_engine(cfg) else 4
        all_heads = wide * (query + (key + value) * cfg.dims.context) + itemsize * output
        return all_heads + 4 * shape.indexer.topk * cfg.dims.tensor
    if uses_transformer_engine(cfg):
        return itemsize * (query + key + value + output) + 4 * heads
    context = cfg.dims.context
    extra = 0.0
    if shape.latent is None and itemsize == 4 and context == 1:
        # In float32 with one context rank, values are a view that keeps queries and keys alive too.
        extra = query + key
    elif value < key and context > 1:
        # Values are padded to the size of keys, apart for each of a rank's two chunks of a
        # sequence, which together attend to all of it and to one chunk again: half a rank's tokens.
        extra = key / 2
    inner = 4 * (2 * query + 2 * key * context + extra)
    return inner + 4 * heads + itemsize * output


def _around_attention(cfg: Config, shape: ModelShape) -> float:
    """Norms of queries and keys or of their latents, and the four tables of an unfused RoPE."""
    itemsize = ITEMSIZE[cfg.model.dtype]
    fused = _is_fused(cfg, "apply_rope_fusion")
    tables = 0.0 if fused else 4.0 * shape.rotary_dim * itemsize
    if shape.latent is not None:
        ranks = shape.latent.query_rank, shape.latent.rank
        norms = sum(_norm(cfg, rank) - fp8.less_of_inputs(cfg) * rank for rank in ranks if rank)
        # The latent of keys and values is a view, which keeps the rotated part of keys alive too,
        # unless its norm copies it to float32.
        is_copied = itemsize == 2 and not uses_transformer_engine(cfg)
        view = 0 if is_copied else itemsize * shape.latent.rotary_dim
        return tables + (norms + view) * token_share(cfg)
    return tables + _norms_of_heads(cfg, shape)


def _norms_of_heads(cfg: Config, shape: ModelShape) -> float:
    """Norms of queries and keys, without their outputs."""
    if not shape.qk_norm:
        return 0.0
    heads = shape.num_attention_heads + shape.num_key_value_heads
    norm = _norm(cfg, shape.head_dim) - ITEMSIZE[cfg.model.dtype] * shape.head_dim
    return heads * norm / cfg.dims.tensor


def _inner(cfg: Config, shape: ModelShape) -> float:
    """Bytes of an MLP per intermediate element: with gates both halves, and what is computed from
    them.

    Without fusion, the latter is the activated half, another copy of the other half, and their
    product. Without gates it is what is above 0, and its square.
    """
    itemsize, kept = ITEMSIZE[cfg.model.dtype], fp8.input_itemsize(cfg)
    if not shape.has_gates:
        return itemsize + kept
    return itemsize * (2 if _is_fused(cfg, "bias_activation_fusion") else 4) + kept


def _experts(cfg: Config, shape: ModelShape) -> float:
    """Router, permuted tokens and chosen experts, if all of these get equally many tokens."""
    moe, itemsize = shape.moe, ITEMSIZE[cfg.model.dtype]
    assert moe is not None
    # 8: Megatron-Core sorts all pairs of a token and an expert, and keeps their order whole.
    router = 8 * moe.num_experts + 20 * moe.experts_per_token
    if moe.score_function == "sigmoid":  # all scores, and the sum of those that are chosen
        router += 4 * moe.num_experts + 4
    # Ranks that split an expert's matrices all hold the tokens of the whole group, each with its
    # float32 probability, and a part of the columns.
    tokens = (fp8.expert_itemsize(cfg) * shape.hidden_size + 4) * cfg.dims.expert_tensor
    weighed = 0 if _is_fused(cfg, "bias_activation_fusion") else itemsize
    columns = (_inner(cfg, shape) + weighed) * moe.intermediate_size
    return (router + moe.experts_per_token * (tokens + columns)) * token_share(cfg)


def _entry_of(module: str, cfg: Config, shape: ModelShape) -> float:
    """Bytes per token of a recomputed module's inputs and output, which it keeps all the same."""
    if module != "core_attn":
        return 0.0
    if shape.indexer is not None:  # its blocks are computed again as it is
        return _core_attention(cfg, shape) / cfg.dims.tensor
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    queries_and_keys = shape.head_dim * (heads + kv_heads)
    values, output = kv_heads * shape.value_dim, heads * shape.value_dim
    if shape.latent is None:  # they are a view of what comes with queries and keys
        gates = heads * shape.head_dim if shape.has_output_gate else 0
        values += queries_and_keys + gates
    inputs = queries_and_keys + values
    return ITEMSIZE[cfg.model.dtype] * (inputs + output) / cfg.dims.tensor


def _offloaded(cfg: Config, shape: ModelShape) -> float:
    """Bytes per token that `offload_modules` take from what a layer keeps."""
    settings = cfg.model.megatron
    if not settings.get("fine_grained_activation_offloading"):
        return 0.0
    itemsize, share, row = ITEMSIZE[cfg.model.dtype], token_share(cfg), row_bytes(cfg, shape)
    fused = uses_transformer_engine(cfg)
    norm = _norm(cfg, shape.hidden_size) * share
    output = itemsize * shape.num_attention_heads * shape.value_dim / cfg.dims.tensor
    # The norm that is fused into it.
    before_qkv = norm if fused and shape.has_pre_norms else row
    before_qkv -= fp8.less_of_inputs(cfg) * shape.hidden_size * share
    parts = {
        "attn_norm": norm - row,
        "qkv_linear": before_qkv + _norms_of_heads(cfg, shape),
        # The product after it keeps its output, too.
        "core_attn": _core_attention(cfg, shape) / cfg.dims.tensor - output,
        "attn_proj": output,
    }
    modules = {*shape.modules(0)}
    if not modules & {"attention", "linear"}:
        parts = {}
    if "moe" in modules or ("mlp" in modules and not fused):
        parts["mlp_norm"] = norm - row
    if shape.moe is not None:
        chosen = shape.moe.experts_per_token * share
        width = shape.hidden_size * cfg.dims.expert_tensor
        parts["expert_fc1"] = chosen * fp8.expert_itemsize(cfg) * width
        parts["moe_act"] = chosen * 2 * itemsize * shape.moe.intermediate_size
    return sum(parts[name] for name in settings.get("offload_modules", ()) if name in parts)


PARTS = frozenset(
    {"attention", "core_attn", "delta_rule", "indexer"}
    | {"layernorm", "mlp", "moe", "shared_experts"}
)
"""The parts of a layer, by Megatron-Core's names for `recompute_modules`; those that it lacks have
no operations that count (`moe_act`) or are refused by the trainer (`mla_up_proj`). `attention` is
all of it but `core_attn`, `delta_rule`, and the scores of an `indexer`. Only full recomputation
repeats these two, and `attention`."""


def recomputed_parts(cfg: Config) -> frozenset[str]:
    """The parts that a layer of `recomputed_layers` recomputes."""
    settings = cfg.model.megatron
    match settings.get("recompute_granularity"):
        case "full":
            return PARTS
        case "selective":
            modules = frozenset(settings.get("recompute_modules") or DEFAULT_MODULES)
            return modules | {"shared_experts"} if "moe" in modules else modules
    return frozenset()


def recomputed_layers(cfg: Config, chunks: Sequence[range]) -> list[range]:
    """The layers of model chunks that recompute: with `recompute_method: block` the first ones."""
    settings = cfg.model.megatron
    chosen = settings.get("recompute_granularity"), settings.get("recompute_method")
    if chosen == ("full", "block"):
        return [chunk[: settings.get("recompute_num_layers") or 0] for chunk in chunks]
    return list(chunks)
