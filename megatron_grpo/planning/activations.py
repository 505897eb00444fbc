"""Estimates the bytes that Megatron-Core's layers keep for their backward.

Sums `Block.saved` over modules: from documentation and source of Transformer Engine, from
measurements of torch's layers (a test compares). Equal layers are counted once.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import mul

from checkpoint_convert import ModelShape
from megatron_grpo.config.config import Config
from megatron_grpo.planning.block import Saved, kernels_of, token_share
from megatron_grpo.planning.card import ITEMSIZE
from megatron_grpo.planning.layer_kinds import (
    LayerKind,
    kinds_of_layers,
    kinds_of_stage,
    layer_kinds,
    mtp_kind,
)
from megatron_grpo.planning.precision import Precision, model_precision, precision
from megatron_grpo.planning.workload import in_flight
from parallel import pipeline_layers
from parallel.tiles import tile_columns

DEFAULT_MODULES = ("core_attn",)
"""Modules that Megatron-Core recomputes with `recompute_granularity: selective` and no list."""
EXPERTS, SHARED = "moe", "shared_experts"
"""Modules of `recompute_modules`: the first includes the second."""


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Bytes of one layer for its backward, per token of a context rank."""

    kept: float
    """Kept on the GPU from the forward on."""
    recomputed: float
    """Additional bytes while the layer's backward runs; 0 without recomputation."""
    offloaded: float = 0.0
    """Kept in host memory: `fine_grained_activation_offloading`."""


def layer_bytes(cfg: Config, kind: LayerKind, linear: Precision | None = None) -> LayerBytes:
    """Bytes that a layer keeps under the recomputation of `cfg`.

    `recompute_method: block` counts its layers as spread evenly over chunks of the longest's size.
    Unknown entries of `recompute_modules` count as kept. `linear`: precision of linear layers;
    None: `precision(cfg)`.
    """
    kernels, settings = kernels_of(cfg, linear or precision(cfg)), cfg.model.megatron
    parts = [part for block in kind.blocks for part in block.saved(kernels).items()]
    kept, recomputed = _kept(cfg, kind.shape, parts)
    offloaded = 0.0
    if settings.get("fine_grained_activation_offloading"):
        modules = settings.get("offload_modules", ())
        for block in kind.blocks:
            offloadable = block.offloadable(kernels)
            offloaded += sum(offloadable.get(name, 0) for name in modules)
    return LayerBytes(kept=kept - offloaded, recomputed=recomputed, offloaded=offloaded)


def _kept(
    cfg: Config, shape: ModelShape, parts: Sequence[tuple[str, Saved]]
) -> tuple[float, float]:
    """(bytes of a layer from its forward on, additional bytes during its backward)."""
    stored, settings = sum(saved.num_bytes for _, saved in parts), cfg.model.megatron
    entry = row_bytes(cfg, shape)
    match settings.get("recompute_granularity"):
        case "full" if settings.get("recompute_method") == "uniform":
            layers = settings.get("recompute_num_layers") or 1
            # One input for each group of layers, which the backward then holds whole.
            return entry / layers, stored * layers
        case "full":
            stages = pipeline_layers(shape.num_layers, cfg.dims)
            longest = max(len(chunk) for chunks in stages for chunk in chunks)
            share = min(1.0, (settings.get("recompute_num_layers") or 0) / longest)
            return share * entry + (1 - share) * stored, stored
        case "selective":
            modules = settings.get("recompute_modules") or DEFAULT_MODULES
            again: dict[str, float] = defaultdict(float)
            for part, saved in parts:
                module = EXPERTS if part == SHARED and EXPERTS in modules else part
                again[module] += saved.num_bytes - saved.entry
            chosen = [again[module] for module in modules]
            # Modules are recomputed one after another: the largest decides.
            return stored - sum(chosen), max(chosen)
    return stored, 0.0


def is_recomputed(cfg: Config, part: str) -> bool:
    """Whether a layer of `recomputed_layers` recomputes a part of a module."""
    settings = cfg.model.megatron
    match settings.get("recompute_granularity"):
        case "full":
            return True
        case "selective":
            modules = settings.get("recompute_modules") or DEFAULT_MODULES
            return part in modules or (part == SHARED and EXPERTS in modules)
    return False


def recomputed_layers(cfg: Config, chunks: Sequence[range]) -> list[range]:
    """Layers that recompute in each chunk: with `recompute_method: block` the first ones."""
    settings = cfg.model.megatron
    chosen = settings.get("recompute_granularity"), settings.get("recompute_method")
    if chosen == ("full", "block"):
        return [chunk[: settings.get("recompute_num_layers") or 0] for chunk in chunks]
    return list(chunks)


def stage_activations(cfg: Config, shape: ModelShape, stage: int, microbatches: int) -> int:
    """Peak bytes of activations on a rank of a stage, without the head.

    The stage holds `in_flight` microbatches of `train.max_tokens_per_microbatch` tokens.
    """
    dims = cfg.dims
    kept = recomputed = leaving = 0.0
    for layer, num_layers in _held_layers(cfg, shape, stage, microbatches):
        kept += layer.kept * num_layers
        recomputed = max(recomputed, layer.recomputed)
        # A layer's copies to the host free their GPU memory once the next layer's have left.
        leaving = max(leaving, layer.offloaded * min(2, num_layers))
    # A chunk keeps its input; its output is freed once it is sent.
    forwards = in_flight(stage, dims.pipeline, dims.virtual_pipeline, microbatches)
    between = sum(forwards) * row_bytes(cfg, shape) if dims.pipeline > 1 else 0
    return round(rank_tokens(cfg) * (kept + recomputed + leaving + between))


def offloaded_bytes(cfg: Config, shape: ModelShape, stage: int, microbatches: int) -> int:
    """Peak bytes of activations in host memory, of a rank of a stage."""
    layers = _held_layers(cfg, shape, stage, microbatches)
    return round(rank_tokens(cfg) * sum(layer.offloaded * count for layer, count in layers))


def most_offloaded(cfg: Config, shape: ModelShape) -> float:
    """Bytes per token of a context rank that a forward moves to the host, on the busiest stage."""
    layers = [
        (kind, layer_bytes(cfg, kind, each).offloaded) for each, kind in kinds_of_layers(cfg, shape)
    ]
    return max(
        sum(kind.count_in(*chunks) * offloaded for kind, offloaded in layers)
        for chunks in pipeline_layers(shape.num_layers, cfg.dims)
    )


def _held_layers(
    cfg: Config, shape: ModelShape, stage: int, microbatches: int
) -> Iterator[tuple[LayerBytes, int]]:
    """Yield each kind of a stage's layers, with the peak number of layer forwards in flight."""
    dims = cfg.dims
    forwards = in_flight(stage, dims.pipeline, dims.virtual_pipeline, microbatches)
    chunks = pipeline_layers(shape.num_layers, dims)[stage]
    for each, kind in kinds_of_stage(cfg, shape, stage):
        yield layer_bytes(cfg, kind, each), sum(map(mul, map(kind.count_in, chunks), forwards))


def forward_bytes(cfg: Config, shape: ModelShape, stage: int) -> int:
    """Peak bytes of a stage's forward without gradients.

    A layer's tensors live until the next layer's. Left out: FP8 copies of inputs, which live for
    one product.
    """
    chunks, linear = pipeline_layers(shape.num_layers, cfg.dims)[stage], model_precision(cfg)
    kinds = [kind for kind in layer_kinds(shape) if kind.count_in(*chunks)]
    layers = [layer_bytes(cfg, kind, linear) for kind in kinds]
    # Nothing is offloaded without gradients: those bytes stay on the GPU.
    most = max(max(each.kept + each.offloaded, each.recomputed) for each in layers)
    return round(rank_tokens(cfg) * most)


def working_bytes(
    cfg: Config, shape: ModelShape, stage: int, device: str, *, backward: bool
) -> int:
    """Largest `Block.working_bytes` of a stage's modules."""
    kinds = kinds_of_stage(cfg, shape, stage)
    found = (
        block.working_bytes(cfg, device, backward=backward)
        for _, kind in kinds
        for block in kind.blocks
    )
    return max(found)


def head_bytes(cfg: Config, shape: ModelShape, *, backward: bool, device: str) -> int:
    """Peak bytes of log-probabilities on the last stage, as if every token were of a response.

    Forward: hidden states (a copy of the rank's own and, with sequence parallelism, those of all
    tensor ranks) and three float32 copies of a tile of logits, whose width depends on `device`
    (`cpu` or `cuda`; parallel/logit_tiles.py). Backward: also what the final norm keeps, the
    gradient of hidden states and, unless the head is frozen, of its weights.
    """
    itemsize, width, tokens = ITEMSIZE[cfg.model.dtype], shape.hidden_size, rank_tokens(cfg)
    columns = -(-shape.vocab_size // cfg.dims.tensor)
    tile = min(columns, tile_columns(round(tokens), width, columns, device))
    share = token_share(cfg)
    # Sequence parallelism gathers all rows, next to the rank's own share.
    rows = itemsize * width * (share if share == 1 else share + 1)
    forward = tokens * (rows + 3 * 4 * tile)
    if not backward:
        return round(forward)
    # A float32 sum; with 16-bit factors also the product of a tile, before it is added.
    to_hidden = tokens * (4 if itemsize == 4 else 2 * 4) * width
    to_weight = 0 if cfg.lora.r else itemsize * columns * width
    return round(forward + to_hidden + to_weight + tokens * final_norm_bytes(cfg, shape))


def mtp_activations(cfg: Config, shape: ModelShape, stage: int) -> int:
    """Bytes that the multi-token-prediction layer keeps of one microbatch: its backward follows at
    once.

    Counts the layer, the norms of hidden states and embeddings, what joins them, and the last norm.
    The head needs as much as the policy's, but later. Full recomputation takes the layer alone,
    whatever method and number of layers are set.
    """
    if not shape.trains_mtp or stage < cfg.dims.pipeline - 1:
        return 0
    by_itself = {"recompute_method": "uniform", "recompute_num_layers": 1}
    model = cfg.model.model_copy(update={"megatron": {**cfg.model.megatron, **by_itself}})
    inner = layer_bytes(cfg.model_copy(update={"model": model}), mtp_kind(shape))
    joined = 4 * row_bytes(cfg, shape)  # both, apart and together
    norms = 3 * final_norm_bytes(cfg, shape)
    return round(rank_tokens(cfg) * (inner.kept + inner.recomputed + joined + norms))


def final_norm_bytes(cfg: Config, shape: ModelShape) -> float:
    """Bytes that the norm before the head keeps per token of a context rank, without its output."""
    kernels = kernels_of(cfg, model_precision(cfg))
    return kernels.norm(shape.hidden_size) * kernels.token_share - row_bytes(cfg, shape)


def rank_tokens(cfg: Config) -> float:
    """Tokens of a microbatch on a context rank, at most."""
    return cfg.train.max_tokens_per_microbatch / cfg.dims.context


def row_bytes(cfg: Config, shape: ModelShape) -> float:
    """Bytes of hidden states, per token of a context rank."""
    return ITEMSIZE[cfg.model.dtype] * shape.hidden_size * token_share(cfg)
