"""Memory of an engine on each of its GPUs: weights, their copies, and the cache."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path
from typing import NamedTuple

from checkpoint_convert import ModelShape
from checkpoint_convert.families.decoder import layer_prefix
from checkpoint_convert.families.vision import vision_tensors
from checkpoint_convert.quantized.model import QuantizedModel
from checkpoint_convert.vllm import engine_sizes
from checkpoint_convert.vllm_lora import worker_adapters
from megatron_grpo.config.config import Config
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engine_weights.layouts import (
    engine_dims,
    first_worker,
    num_copied_latents,
    quantized_engine,
    served_shape,
)
from megatron_grpo.engines.arguments import PLANNED, engine_number, engine_table
from megatron_grpo.engines.support import check_card
from megatron_grpo.engines.vllm.args import check_adapters
from megatron_grpo.planning.card import ITEMSIZE, GpuSpec, worker_itemsizes
from megatron_grpo.planning.layer_kinds import layer_kinds, mtp_kind, one_of_each_kind
from megatron_grpo.planning.optimizers import page_locked
from megatron_grpo.policy.lora_targets import targets_of
from parallel import Shape
from parallel.words import counted

CONTEXT_BYTES = 600 * 10**6
"""CUDA context, kernels and cuBLAS workspaces of a process."""
COMMUNICATOR_BYTES = 500 * 10**6
"""NCCL's buffers of one communicator. Published figures: 7 to 10 GB for idle ones of large jobs."""


@dataclass(frozen=True, kw_only=True)
class EngineBytes:
    """Memory that an engine takes on each of its GPUs."""

    weights: int
    """Weights, buffers of adapters, a vision tower, and copies of latents' up-projections."""
    pushed: int
    """Part of `weights` that a push fills."""
    cache: int
    """Bytes left for keys and values, including vLLM's activations."""
    token_bytes: int
    """Cached bytes of one token: keys and values, or latents."""
    sequence_bytes: int
    """Bytes of linear attention's state of one sequence, in the same cache."""
    cached_tokens: int
    """Tokens that fit in the cache of the whole engine, without states of linear attention."""
    outside: int
    """CUDA context and NCCL buffers, which vLLM allocates before it determines its share, and the
    buffers of the push, which its memory profiling does not see."""
    on_host: int = 0
    """Host memory for its weights, from its first sleep on, if pushes do not bring them."""

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.outside


def engine_bytes(cfg: Config, shape: ModelShape, card: GpuSpec) -> EngineBytes | None:
    """Memory of an engine of `cfg` on each GPU; None without an engine on GPUs.

    Raises ValueError if its weights do not fit, if the card lacks their dtype, or if the engine
    cannot serve the run's adapters.
    """
    if not cfg.num_engines:
        return None
    check_adapters(cfg.lora, shape)
    if not cfg.rollout.base_urls:
        check_card(cfg.rollout, shape, cfg.model.dtype, card.capability)
    weights, per_token = _weight_bytes(cfg, shape), _token_bytes(cfg, shape)
    not_pushed = _absorbed_bytes(cfg, shape) + engine_tower_bytes(cfg)
    if card.memory - weights < per_token:
        raise ValueError(
            f"{_describe_engine(cfg.rollout, card, weights)}: {_larger_engine(cfg, shape, card)}"
        )
    cache = _cache_bytes(cfg.rollout, card, weights, per_token)
    return EngineBytes(
        weights=weights,
        pushed=_adapter_bytes(cfg, shape) or weights - not_pushed,
        cache=cache,
        token_bytes=per_token,
        sequence_bytes=_sequence_bytes(cfg, shape),
        cached_tokens=cfg.rollout.data_parallel_size * (cache // per_token),
        outside=CONTEXT_BYTES
        + COMMUNICATOR_BYTES * (cfg.rollout.gpus_per_engine > 1)
        + push_buffers(cfg),
        on_host=_asleep_bytes(cfg, shape),
    )


def push_buffers(cfg: Config) -> int:
    """Upper bound of the push buffers that a process keeps from the first push on."""
    return cfg.rollout.update_weights_bucket_megabytes * 10**6 if cfg.num_engines else 0


def _weight_bytes(cfg: Config, shape: ModelShape) -> int:
    loaded = sum(each.num_layers * each.padded_bytes for each in worker_tensors(cfg, shape))
    copies = _adapter_bytes(cfg, shape) + _absorbed_bytes(cfg, shape) + engine_tower_bytes(cfg)
    return loaded + copies


def _absorbed_bytes(cfg: Config, shape: ModelShape) -> int:
    """Bytes of copies of the weights that project latents up, for decode steps."""
    latent, tensor = shape.latent, cfg.rollout.tensor_parallel_size
    if latent is None:
        return 0
    copied = num_copied_latents(cfg.rollout, shape, cfg.model.dtype)
    width = shape.head_dim - latent.rotary_dim + latent.value_dim
    columns = shape.num_attention_heads // tensor * width
    return copied * latent.rank * columns * ITEMSIZE[cfg.model.dtype]


def _adapter_bytes(cfg: Config, shape: ModelShape) -> int:
    return sum(_adapter_sizes(cfg, shape))


def _adapter_sizes(cfg: Config, shape: ModelShape) -> list[int]:
    """Bytes of each adapter buffer of a worker."""
    if not cfg.lora.is_served:
        return []
    modules, dims = targets_of(cfg.lora, shape), engine_dims(cfg.rollout)
    first = worker_adapters(shape, dims, modules, cfg.lora.r, worker=0)
    return [prod(size) * ITEMSIZE[cfg.model.dtype] for size in first.shapes.values()]


def _asleep_bytes(cfg: Config, shape: ModelShape) -> int:
    """Host memory of a worker that sleeps with its weights: vLLM's level 1."""
    if not (cfg.lora.is_served and cfg.rollout.enable_sleep_mode):
        return 0
    weights = sum(x.num_layers * page_locked(x.padded_bytes) for x in worker_tensors(cfg, shape))
    return weights + sum(map(page_locked, _adapter_sizes(cfg, shape)))


def _token_bytes(cfg: Config, shape: ModelShape) -> int:
    """Bytes of a token in each worker's cache."""
    kinds = [(len(kind.layers), kind) for kind in layer_kinds(shape)]
    if served_shape(shape, cfg.rollout).trains_mtp:
        kinds.append((1, mtp_kind(shape)))
    tensor, itemsize = cfg.rollout.tensor_parallel_size, _cache_itemsize(cfg)
    return sum(
        num_layers * block.cached_bytes(tensor, itemsize)
        for num_layers, kind in kinds
        for block in kind.blocks
    )


def _sequence_bytes(cfg: Config, shape: ModelShape) -> int:
    """Bytes of a sequence on each worker that do not depend on its length.

    Left out: vLLM's pages hold some thousand tokens, and a sequence briefly has two of them.
    """
    itemsize, num_drafted = ITEMSIZE[cfg.model.dtype], cfg.rollout.num_speculative_tokens
    num_bytes = sum(
        len(kind.layers) * block.sequence_bytes(itemsize, num_drafted)
        for kind in layer_kinds(shape)
        for block in kind.blocks
    )
    return num_bytes // cfg.rollout.tensor_parallel_size


def _cache_bytes(rollout: RolloutConfig, card: GpuSpec, weights: int, per_token: int) -> int:
    """Bytes of an engine's cache: `kv_cache_memory_bytes`, or what weights leave of its share."""
    engine = _describe_engine(rollout, card, weights)
    given, names = engine_number(rollout, "kv_cache_memory_bytes"), PLANNED[rollout.engine]
    if given is None:
        share = engine_table(rollout).get(names.memory_fraction, names.default_fraction)
        cache = round(share * card.memory) - weights
        if cache < per_token:
            raise ValueError(
                f"{engine}, and rollout.{rollout.engine}.{names.memory_fraction} {share:g} leaves "
                "nothing for keys and values: use "
                f"{ceil(100 * (weights + per_token) / card.memory) / 100} or more, or a larger "
                "tensor_parallel_size"
            )
        return cache
    room = card.memory - weights
    if not per_token <= given <= room:
        raise ValueError(
            f"{engine}, and rollout.{rollout.engine}.kv_cache_memory_bytes is {given}; one token "
            f"takes {per_token}: use {per_token} to {room}, or a larger tensor_parallel_size"
        )
    return given


def _describe_engine(rollout: RolloutConfig, card: GpuSpec, weights: int) -> str:
    """Start of a message about an engine that is too large: its weights and its GPUs' memory."""
    return (
        f"an engine of {rollout.engine_size_text} has {weights / 1e9:.1f} GB of weights on each "
        f"GPU of {card.memory / 1e9:.0f} GB"
    )


def _larger_engine(cfg: Config, shape: ModelShape, card: GpuSpec) -> str:
    """Name the fewest GPUs that hold an engine's weights."""
    sizes = [
        size
        for size in engine_sizes(shape, engine_dims(cfg.rollout))
        if (gpus := size * cfg.rollout.data_parallel_size) <= card.per_node
        or gpus % card.per_node == 0
    ]
    for size in sizes:
        rollout = cfg.rollout.model_copy(update={"tensor_parallel_size": size})
        sized = cfg.model_copy(update={"rollout": rollout})
        needed = _weight_bytes(sized, shape) + _token_bytes(sized, shape)
        least = needed / PLANNED[rollout.engine].default_fraction
        if least <= card.memory:
            gpus = rollout.gpus_per_engine
            nodes = f", {gpus // card.per_node} nodes of {card.per_node}"
            return f"set it to {size}{nodes if gpus > card.per_node else ''}"
    return (
        f"no engine size is enough, as at most {counted(sizes[-1], 'GPU')} can split the model: "
        f"use GPUs (--gpu) of more than {least / 1e9:.0f} GB"
    )


def _cache_itemsize(cfg: Config) -> int:
    """Bytes per element of keys and values: as for weights, unless they are cached in 8 bits."""
    kind = str(engine_table(cfg.rollout).get("kv_cache_dtype", "auto"))
    return 1 if kind.startswith(("fp8", "int8")) else ITEMSIZE[cfg.model.dtype]


def engine_tower_bytes(cfg: Config) -> int:
    """Bytes of a frozen vision tower on each worker of an engine, split evenly.

    Left out: biases, norms and patch embeddings, some megabytes, which every worker has whole.
    """
    if cfg.data.image_column is None or not cfg.model.freeze_vision:
        return 0
    whole = tower_weights(cfg.model.path) * ITEMSIZE[cfg.model.dtype]
    return whole // cfg.rollout.tensor_parallel_size


def tower_weights(folder: Path) -> int:
    """Elements of the vision tower of the model in `folder`."""
    return sum(prod(size) for _, size in vision_tensors(folder))


class WorkerTensor(NamedTuple):
    """A tensor of an engine worker, once for all layers of a kind."""

    source: str
    """Tensor of the weight files that it is cut from."""
    padded_bytes: int
    num_bytes: int
    """Without padding."""
    num_layers: int
    """Number of layers with this tensor; 1 outside of layers."""


def worker_tensors(cfg: Config, shape: ModelShape) -> Iterator[WorkerTensor]:
    """Tensors of a worker, without scales of quantised weights.

    Raises ValueError if an engine cannot split the model, quantised or not.
    """
    whole = quantized_engine(cfg.rollout, shape, cfg.model.dtype)
    quantized = _by_layer(shape, whole)
    few, layers = one_of_each_kind(shape, lambda layer: frozenset(quantized.get(layer, ())))
    counts = {layer_prefix(few, number): len(alike) for number, alike in enumerate(layers)}
    layout = first_worker(few, cfg.rollout)
    itemsizes = worker_itemsizes(cfg, few, whole and _of_few(whole, few, quantized, layers))
    sources: dict[str, str] = {}
    filled: dict[str, int] = defaultdict(int)
    for piece in layout.pieces:
        sources[piece.local] = piece.tensor
        filled[piece.local] += piece.box.num_elements
    for name, source in sources.items():
        itemsize = itemsizes[name]
        count = [count for prefix, count in counts.items() if source.startswith(prefix)]
        yield WorkerTensor(
            source=source,
            padded_bytes=prod(layout.shapes[name]) * itemsize,
            num_bytes=filled[name] * itemsize,
            num_layers=count[0] if count else 1,
        )


def _by_layer(shape: ModelShape, model: QuantizedModel | None) -> dict[int, dict[str, Shape]]:
    """Quantised weights of each layer, by name within the layer."""
    found: dict[int, dict[str, Shape]] = defaultdict(dict)
    before = len(layer_prefix(shape, 0)) - len("0.")
    for name, size in model.matrices.items() if model else ():
        layer, _, own = name[before:].partition(".")
        found[int(layer)][own] = size
    return found


def _of_few(
    model: QuantizedModel,
    few: ModelShape,
    quantized: dict[int, dict[str, Shape]],
    layers: Sequence[Sequence[int]],
) -> QuantizedModel:
    """Restrict `model` to the first layer of each kind in `layers`, numbered as in `few`."""
    # Behind the model's layers stands the one for multi-token prediction, which drafts.
    firsts = [*(alike[0] for alike in layers), sum(map(len, layers))]
    matrices = {
        layer_prefix(few, number) + own: size
        for number, layer in enumerate(firsts)
        for own, size in quantized.get(layer, {}).items()
    }
    return replace(model, matrices=matrices)
