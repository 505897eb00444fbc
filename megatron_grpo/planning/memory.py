"""Bytes of a GPU of each pipeline stage, at the worst moment of every phase."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from checkpoint_convert import ModelShape
from megatron_grpo.config.config import Config
from megatron_grpo.config.rollout_config import RolloutConfig
from megatron_grpo.planning.activations import forward_bytes, head_bytes, stage_activations
from megatron_grpo.planning.card import Card
from megatron_grpo.planning.state import ITEMSIZE, StateBytes
from megatron_grpo.rollout.vllm_command import engine_number
from megatron_grpo.weights.worker_layouts import worker_layouts

CONTEXT_BYTES = 600 * 10**6
"""CUDA context, kernels and workspaces of cuBLAS in a process."""
COMMUNICATOR_BYTES = 500 * 10**6
"""NCCL's buffers of one communicator. Published are 7 to 10 GB for idle ones of large jobs."""
RESERVE = 0.1
"""Of a card, that a plan leaves free for fragmentation, and for NCCL where it takes more."""
VLLM_UTILIZATION = 0.92
"""What vLLM takes of a card when it is not told (`gpu_memory_utilization`)."""


@dataclass(frozen=True, kw_only=True)
class EngineBytes:
    """What an engine takes of each of its GPUs."""

    weights: int
    cache: int
    """Left for keys and values, what it computes with included."""
    token_bytes: int
    """Keys and values of one token."""
    cached_tokens: int
    """That fit there, over the whole engine."""
    outside: int
    """CUDA context and NCCL's buffers, which vLLM has before it looks what its share may be, and
    the push's, which its profile does not see."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.outside


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Of a GPU that runs a trainer rank of one pipeline stage."""

    stage: int
    state: StateBytes
    communicators: int
    """NCCL's buffers and the CUDA context; an estimate."""
    engine: int
    """Of an engine on the same GPU, which keeps it all the time."""
    phases: dict[str, int]
    """What each phase of a step has beside that, at its worst moment."""

    @property
    def worst(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: self.phases[phase])

    @property
    def total(self) -> int:
        """Bytes in that phase."""
        return self.state.total + self.communicators + self.engine + self.phases[self.worst]

    def as_json(self) -> dict[str, object]:
        """For scripts."""
        return asdict(self) | {"worst_phase": self.worst, "total": self.total}


def memory_limit(card: Card) -> int:
    """Bytes of a card that a plan may use."""
    return round((1 - RESERVE) * card.memory)


def fullest_stage(stages: Sequence[StageMemory]) -> StageMemory:
    """The stage that needs most memory."""
    return max(stages, key=lambda stage: stage.total)


def engine_bytes(cfg: Config, shape: ModelShape, card: Card) -> EngineBytes | None:
    """What an engine of `cfg` takes of each GPU; None where rollouts come from no vLLM.

    Raises ValueError where its weights do not fit there.
    """
    if cfg.rollout.engine != "vllm":
        return None
    itemsize = ITEMSIZE[cfg.model.dtype]
    weights = max(worker.num_elements for worker in worker_layouts(shape, cfg.rollout)) * itemsize
    heads = -(-shape.num_key_value_heads // cfg.rollout.tensor_parallel_size)
    per_token = 2 * shape.num_layers * heads * shape.head_dim * _cache_itemsize(cfg)
    cache = _cache_bytes(cfg.rollout, card, weights, per_token)
    return EngineBytes(
        weights=weights,
        cache=cache,
        token_bytes=per_token,
        cached_tokens=cache // per_token,
        outside=CONTEXT_BYTES
        + COMMUNICATOR_BYTES * (cfg.rollout.tensor_parallel_size > 1)
        + cfg.rollout.update_weights_bucket_megabytes * 10**6,
    )


def _cache_bytes(rollout: RolloutConfig, card: Card, weights: int, per_token: int) -> int:
    """Beside the weights of an engine, as it is told, or the rest of its share of the card."""
    engine = (
        f"an engine of rollout.tensor_parallel_size {rollout.tensor_parallel_size} has "
        f"{weights / 1e9:.1f} GB of weights on each GPU of {card.memory / 1e9:.0f} GB"
    )
    room = card.memory - weights
    if room < per_token:
        raise ValueError(f"{engine}: {_way_out(rollout, card, weights)}")
    given = engine_number(rollout.vllm, "kv_cache_memory_bytes")
    if given is None:
        share = rollout.vllm.get("gpu_memory_utilization", VLLM_UTILIZATION)
        cache = round(share * card.memory) - weights
        if cache < per_token:
            raise ValueError(
                f"{engine}, and rollout.vllm.gpu_memory_utilization {share:g} leaves nothing for "
                f"keys and values: use more than {(weights + per_token) / card.memory:.2f}, or a "
                "larger tensor_parallel_size"
            )
        return cache
    if not per_token <= given <= room:
        raise ValueError(
            f"{engine}, and rollout.vllm.kv_cache_memory_bytes is {given}, where a token takes "
            f"{per_token}: use {per_token} to {room}, or a larger tensor_parallel_size"
        )
    return given


def _way_out(rollout: RolloutConfig, card: Card, weights: int) -> str:
    """For an engine whose GPUs do not hold its weights."""
    in_node = weights * rollout.tensor_parallel_size / card.per_node
    if in_node < card.memory:
        return "use a larger tensor_parallel_size"
    return (
        f"no engine on one node of {card.per_node} holds it, and none runs on several; take GPUs "
        f"(--gpu) of more than {in_node / 1e9:.0f} GB, and all {card.per_node} of a node"
    )


def _cache_itemsize(cfg: Config) -> int:
    """Of keys and values: bytes of an element, as in the weights unless vLLM has 8 bits for it."""
    kind = str(cfg.rollout.vllm.get("kv_cache_dtype", "auto"))
    return 1 if kind.startswith(("fp8", "int8")) else ITEMSIZE[cfg.model.dtype]


def stages_memory(
    cfg: Config,
    shape: ModelShape,
    states: Sequence[StateBytes],
    microbatches: int,
    engine: int,
    device: str = "cuda",
) -> list[StageMemory]:
    """What a GPU of each stage needs, beside `stage_states` and so many bytes of an engine.

    With `device` "cpu", what a process without a GPU needs.
    """
    return [
        StageMemory(
            stage=stage,
            state=state,
            communicators=CONTEXT_BYTES + COMMUNICATOR_BYTES * _communicators(cfg),
            engine=engine,
            phases=_phases(cfg, shape, stage, microbatches, device),
        )
        for stage, state in enumerate(states)
    ]


def _phases(
    cfg: Config, shape: ModelShape, stage: int, microbatches: int, device: str
) -> dict[str, int]:
    """Bytes of each phase beside what is always there."""
    is_last = stage == cfg.dims.pipeline - 1
    head, backward_head = (
        head_bytes(cfg, shape, backward=backward, device=device) if is_last else 0
        for backward in (False, True)
    )
    return {
        "log-probabilities": forward_bytes(cfg, shape) + head,
        "train": stage_activations(cfg, shape, stage, microbatches) + backward_head,
        "push": cfg.rollout.update_weights_bucket_megabytes * 10**6,
    }


def _communicators(cfg: Config) -> int:
    """Groups of more than one rank in which a rank speaks by NCCL, by Megatron-Core's groups."""
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
    ]
    return sum(size > 1 for size in sizes)
