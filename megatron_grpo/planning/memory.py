"""Peak memory of a GPU of each pipeline stage, in every phase of a step."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod

from checkpoint_convert import ModelShape
from checkpoint_convert.vllm import engine_sizes
from checkpoint_convert.vllm_lora import worker_adapters
from megatron_grpo.config.config import Config
from megatron_grpo.config.offload import Phase, parts_away
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engines.arguments import PLANNED, engine_number, engine_table
from megatron_grpo.engines.kernels import check_card, check_routers, check_sparse
from megatron_grpo.engines.layouts import (
    engine_dims,
    num_copied_latents,
    served_shape,
)
from megatron_grpo.engines.vllm.args import check_adapters
from megatron_grpo.planning.activations import forward_bytes, head_bytes, stage_activations
from megatron_grpo.planning.card import ITEMSIZE, GpuSpec
from megatron_grpo.planning.engine_weights import worker_tensors
from megatron_grpo.planning.fp8 import fp8_weight_bytes
from megatron_grpo.planning.linear_attention import sequence_elements
from megatron_grpo.planning.mtp import mtp_activations, mtp_embedding
from megatron_grpo.planning.optimizer_bytes import page_locked
from megatron_grpo.planning.sparse_attention import working_bytes
from megatron_grpo.planning.state import StateBytes, part_bytes
from megatron_grpo.planning.vision import engine_tower_bytes, tower_bytes
from megatron_grpo.policy.lora_targets import targets_of

CONTEXT_BYTES = 600 * 10**6
"""CUDA context, kernels and cuBLAS workspaces of a process."""
COMMUNICATOR_BYTES = 500 * 10**6
"""NCCL's buffers of one communicator. Published figures: 7 to 10 GB for idle ones of large jobs."""
RESERVE = 0.1
"""Fraction of a card that a plan leaves free for fragmentation, and for NCCL if it takes more."""


@dataclass(frozen=True, kw_only=True)
class EngineBytes:
    """Memory that an engine takes on each of its GPUs."""

    weights: int
    """With the buffers of adapters, a vision tower, and what engines make of latents' weights."""
    pushed: int
    """What a push fills of them."""
    cache: int
    """Bytes left for keys and values, including vLLM's activations."""
    token_bytes: int
    """Bytes of what it caches of one token: keys and values, or their latents."""
    sequence_bytes: int
    """Bytes of what linear attention remembers of one sequence, in the same cache."""
    cached_tokens: int
    """Tokens that fit in the cache of the whole engine, if it remembers no sequences."""
    outside: int
    """CUDA context and NCCL buffers, which vLLM allocates before it determines its share, and the
    buffers of the push, which its memory profiling does not see."""
    on_host: int = 0
    """Host memory for its weights, from its first sleep on, if pushes do not bring them."""

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.cache + self.outside


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory of a GPU that runs a trainer rank of one pipeline stage."""

    stage: int
    state: StateBytes
    buffers: int
    """Those of NCCL (an estimate) and of the push, which both stay, the CUDA context, and the copy
    of the embedding that a layer for multi-token prediction needs."""
    engine: int
    """Memory that an engine, or a reward model, on the same GPU never releases."""
    phases: dict[Phase, int]
    """Additional memory of each phase of a step, at its peak."""
    away: dict[Phase, int]
    """Part of the state that is not on the GPU in each phase: `train.offload`."""

    @property
    def worst(self) -> Phase:
        """The phase that needs the most memory."""
        return max(self.phases, key=self.total_in)

    @property
    def total(self) -> int:
        """Bytes in the worst phase."""
        return self.total_in(self.worst)

    def total_in(self, phase: Phase) -> int:
        """Bytes in a phase, at its peak."""
        always = self.state.total + self.buffers + self.engine
        return always - self.away[phase] + self.phases[phase]

    def as_json(self) -> dict[str, object]:
        """All figures in bytes, for scripts."""
        return asdict(self) | {"worst_phase": self.worst, "total": self.total}


def memory_limit(card: GpuSpec) -> int:
    """Bytes of a card that a plan may use."""
    return round((1 - RESERVE) * card.memory)


def fullest_stage(stages: Sequence[StageMemory]) -> StageMemory:
    """The stage that needs the most memory."""
    return max(stages, key=lambda stage: stage.total)


def engine_bytes(cfg: Config, shape: ModelShape, card: GpuSpec) -> EngineBytes | None:
    """What an engine of `cfg` takes of each GPU; None if it is none on GPUs.

    Raises ValueError if its weights do not fit there, the card is not one for their dtype, or it
    would not serve the run's adapters.
    """
    if cfg.rollout.engine == "transformers" or not cfg.num_engines:
        return None
    check_adapters(cfg.lora, shape)
    if not cfg.rollout.base_urls:
        check_card(cfg.rollout, card.capability)
        check_routers(cfg.rollout, shape, cfg.model.dtype, card.capability)
        check_sparse(cfg.rollout, shape, cfg.model.dtype, card.capability)
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
        + _push_buffers(cfg),
        on_host=_asleep_bytes(cfg, shape),
    )


def _push_buffers(cfg: Config) -> int:
    """What a process keeps, from the first push on, to send or receive weights: at most this."""
    return cfg.rollout.update_weights_bucket_megabytes * 10**6 if cfg.num_engines else 0


def _weight_bytes(cfg: Config, shape: ModelShape) -> int:
    loaded = sum(each.num_layers * each.padded_bytes for each in worker_tensors(cfg, shape))
    beside = _adapter_bytes(cfg, shape) + _absorbed_bytes(cfg, shape) + engine_tower_bytes(cfg)
    return loaded + beside


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
    """Bytes of each buffer of adapters of a worker."""
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
    """What each worker caches of a token.

    At least one key-value head, however many workers there are. Of latent attention it is the
    latent and the rotated part of keys, which have no heads: every worker has both whole. So it has
    the key of an indexer, in 8 bits with a float32 scale for 128 elements; then latents in 8 bits
    have such scales, too, and the rotated part 16 bits (kernels of Blackwell have 8, without them).
    """
    if shape.latent is not None:
        elements = shape.latent.rank + shape.latent.rotary_dim
    else:
        num_heads = -(-shape.num_key_value_heads // cfg.rollout.tensor_parallel_size)
        elements = 2 * num_heads * shape.head_dim
    num_bytes = elements * _cache_itemsize(cfg)
    if shape.indexer is not None:
        num_bytes += shape.indexer.head_dim + shape.indexer.head_dim // 128 * ITEMSIZE["float32"]
        if _cache_itemsize(cfg) == 1:
            assert shape.latent is not None, "indexers have a latent of queries"
            num_bytes += shape.latent.rank // 128 * ITEMSIZE["float32"] + shape.latent.rotary_dim
    num_layers = shape.num_attending_layers + served_shape(shape, cfg.rollout).trains_mtp
    return num_layers * num_bytes


def _sequence_bytes(cfg: Config, shape: ModelShape) -> int:
    """What linear attention remembers of a sequence on each worker, which has some of its heads.

    The last tokens are in the dtype of the model, the memory in float32. Left out: vLLM keeps it in
    pages of some thousand tokens' size, and for moments two of a sequence.
    """
    if shape.linear is None:
        return 0
    tokens, memory = sequence_elements(shape.linear, cfg.rollout.num_speculative_tokens)
    num_bytes = ITEMSIZE[cfg.model.dtype] * tokens + ITEMSIZE["float32"] * memory
    return len(shape.linear_layers) * num_bytes // cfg.rollout.tensor_parallel_size


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
                "nothing for keys and values: use more than "
                f"{(weights + per_token) / card.memory:.2f}, or a larger tensor_parallel_size"
            )
        return cache
    room = card.memory - weights
    if not per_token <= given <= room:
        raise ValueError(
            f"{engine}, and rollout.vllm.kv_cache_memory_bytes is {given}, where a token takes "
            f"{per_token}: use {per_token} to {room}, or a larger tensor_parallel_size"
        )
    return given


def _describe_engine(rollout: RolloutConfig, card: GpuSpec, weights: int) -> str:
    """Beginning of messages about an engine that is too large: its size, and that of its GPUs."""
    return (
        f"an engine of {rollout.engine_size_text} has {weights / 1e9:.1f} GB of weights on each "
        f"GPU of {card.memory / 1e9:.0f} GB"
    )


def _larger_engine(cfg: Config, shape: ModelShape, card: GpuSpec) -> str:
    """Advice for an engine whose GPUs cannot hold its weights: the fewest that can."""
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
        f"no engine holds it, as at most {sizes[-1]} GPUs can split the model; take GPUs (--gpu) "
        f"of more than {least / 1e9:.0f} GB"
    )


def _cache_itemsize(cfg: Config) -> int:
    """Bytes per element of keys and values: as for weights, unless they are cached in 8 bits."""
    kind = str(engine_table(cfg.rollout).get("kv_cache_dtype", "auto"))
    return 1 if kind.startswith(("fp8", "int8")) else ITEMSIZE[cfg.model.dtype]


def stages_memory(
    cfg: Config,
    shape: ModelShape,
    states: Sequence[StateBytes],
    microbatches: int,
    colocated: EngineBytes | None,
    device: str = "cuda",
) -> list[StageMemory]:
    """What a GPU of each stage needs, including its `stage_states` and an engine `colocated` it.

    An engine in sleep mode has no weights and no cache while the ranks compute. A push wakes its
    weights, and then its cache.

    With `device` "cpu", what a process without a GPU needs.
    """
    stages = []
    for stage, state in enumerate(states):
        phases = (
            _phases(cfg, shape, stage, microbatches, device)
            | ({"update": state.update} if state.update else {})
            | _engine_phases(cfg, colocated)
        )
        away = {phase: part_bytes(state, parts_away(cfg.train.offload, phase)) for phase in phases}
        memory = StageMemory(
            stage=stage,
            state=state,
            buffers=CONTEXT_BYTES
            + COMMUNICATOR_BYTES * _num_communicators(cfg)
            + _push_buffers(cfg)
            + mtp_embedding(cfg, shape, stage)
            + tower_bytes(cfg, shape, stage),
            engine=_engine_bytes_always(cfg, colocated),
            phases=phases,
            away=away,
        )
        stages.append(memory)
    return stages


def _phases(
    cfg: Config, shape: ModelShape, stage: int, microbatches: int, device: str
) -> dict[Phase, int]:
    """Bytes of each phase in addition to what is always allocated."""
    is_last = stage == cfg.dims.pipeline - 1
    forward, backward = (
        max(  # neither is there while the other is
            head_bytes(cfg, shape, backward=is_backward, device=device) if is_last else 0,
            working_bytes(cfg, shape, device, backward=is_backward),
        )
        for is_backward in (False, True)
    )
    return {
        "log-probabilities": forward_bytes(cfg, shape, stage)
        + forward
        + fp8_weight_bytes(cfg, shape, stage, backward=False),
        "train": stage_activations(cfg, shape, stage, microbatches)
        + backward
        + fp8_weight_bytes(cfg, shape, stage, backward=True)
        + mtp_activations(cfg, shape, stage),
    }


def _engine_bytes_always(cfg: Config, colocated: EngineBytes | None) -> int:
    """Bytes of a colocated engine in every phase; asleep, only what is outside vLLM's share."""
    if colocated is None:
        return 0
    return colocated.outside if cfg.rollout.enable_sleep_mode else colocated.total


def _engine_phases(cfg: Config, colocated: EngineBytes | None) -> dict[Phase, int]:
    """The phases in which an engine in sleep mode on the same GPU is awake, with its bytes."""
    if colocated is None or not cfg.rollout.enable_sleep_mode:
        return {}
    return {"push": colocated.weights, "generate": colocated.weights + colocated.cache}


def _num_communicators(cfg: Config) -> int:
    """Number of Megatron-Core's groups in which a rank communicates by NCCL with other ranks."""
    dims = cfg.dims
    model, data = dims.tensor * dims.pipeline, dims.data * dims.context
    sizes = [
        dims.world_size,
        dims.tensor,
        dims.pipeline,
        dims.context,
        data,
        model,
        dims.expert * dims.expert_tensor if dims.expert > 1 else 1,
        dims.stage_size if cfg.optimizer.optimizer == "muon" else 1,
    ]
    return sum(size > 1 for size in sizes)
