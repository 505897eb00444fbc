"""Peak memory of a GPU of each pipeline stage, in every phase of a step.

Sums state (`state.py`), activations, a layer for multi-token prediction, a frozen vision tower, and
engines and reward models on the same GPU.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from checkpoint_convert import ModelShape, padded_vocab_size
from megatron_grpo.config.config import Config
from megatron_grpo.config.offload import Phase, parts_away
from megatron_grpo.config.reward import RewardFunction, served_here
from megatron_grpo.config.vision import has_tower
from megatron_grpo.engines.reward_models import gpu_share
from megatron_grpo.planning.activations import (
    forward_bytes,
    head_bytes,
    mtp_activations,
    stage_activations,
    working_bytes,
)
from megatron_grpo.planning.card import ITEMSIZE, GpuSpec
from megatron_grpo.planning.engine_memory import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    EngineBytes,
    push_buffers,
    tower_weights,
)
from megatron_grpo.planning.layer_kinds import kinds_of_stage
from megatron_grpo.planning.optimizers import planned_optimizer
from megatron_grpo.planning.parameters import layer_parameters, local_experts
from megatron_grpo.planning.state import StateBytes, part_bytes
from megatron_grpo.planning.workload import Job
from megatron_grpo.rewards.reward_model import WEIGHTS
from parallel import pipeline_layers

RESERVE = 0.1
"""Fraction of a card that a plan leaves free for fragmentation, and for NCCL if it takes more."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory of a GPU that runs a trainer rank of one pipeline stage."""

    stage: int
    state: StateBytes
    buffers: int
    """CUDA context, buffers of NCCL (an estimate) and of the push, a frozen vision tower, and the
    embedding's copy for multi-token prediction."""
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
    return max(stages, key=lambda stage: stage.total)


def stages_memory(
    job: Job,
    states: Sequence[StateBytes],
    microbatches: int,
    colocated: EngineBytes | None,
    device: str = "cuda",
) -> list[StageMemory]:
    """Memory of a GPU of each stage; `states`: `stage_states`.

    A `colocated` engine in sleep mode has no weights and no cache while the ranks compute. A push
    wakes its weights, and then its cache. Reward models on the GPU are awake in `generate` only.
    With `device` "cpu", memory of a process without a GPU.
    """
    cfg, shape = job.cfg, job.shape
    models, size, stages = shared_models(cfg, job.card), cfg.dims.stage_size, []
    for stage, state in enumerate(states):
        first, end = stage * size, (stage + 1) * size
        sharing = [each for each in models if each.ranks.start < end and each.ranks.stop > first]
        phases = (
            _phases(cfg, shape, stage, microbatches, device)
            | ({"update": state.update} if state.update else {})
            | _engine_phases(cfg, colocated)
        )
        if sharing:
            phases["generate"] = phases.get("generate", 0) + max(each.awake for each in sharing)
        away = {phase: part_bytes(state, parts_away(cfg.train.offload, phase)) for phase in phases}
        memory = StageMemory(
            stage=stage,
            state=state,
            buffers=CONTEXT_BYTES
            + COMMUNICATOR_BYTES * _num_communicators(cfg)
            + push_buffers(cfg)
            + _mtp_embedding(cfg, shape, stage)
            + _tower_bytes(cfg, shape, stage),
            engine=_engine_bytes_always(cfg, colocated)
            + max((each.outside for each in sharing), default=0),
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
        max(  # head and modules never run at the same time
            head_bytes(cfg, shape, backward=is_backward, device=device) if is_last else 0,
            working_bytes(cfg, shape, stage, device, backward=is_backward),
        )
        for is_backward in (False, True)
    )
    return {
        "log-probabilities": forward_bytes(cfg, shape, stage)
        + forward
        + rounded_weights(cfg, shape, stage, backward=False),
        "train": stage_activations(cfg, shape, stage, microbatches)
        + backward
        + rounded_weights(cfg, shape, stage, backward=True)
        + mtp_activations(cfg, shape, stage),
    }


def rounded_weights(cfg: Config, shape: ModelShape, stage: int, *, backward: bool) -> int:
    """Bytes of the FP8 copies of weights that a rank of a stage holds during a pass.

    A forward has one copy; a backward, and layers that recompute, also the transposed one
    (`tensorwise` on Blackwell needs no transpose: counted all the same).
    """
    dims, chunks, total = cfg.dims, pipeline_layers(shape.num_layers, cfg.dims)[stage], 0.0
    for precision, kind in kinds_of_stage(cfg, shape, stage):
        others, expert = layer_parameters(kind.shape, dims.tensor, dims.expert_tensor)
        elements = sum(each.size for each in others if each.is_linear)
        elements += local_experts(shape, dims) * sum(each.size for each in expert if each.is_linear)
        total += kind.count_in(*chunks) * elements * precision.weight_itemsize
    copies = 2 if backward or cfg.model.megatron.get("recompute_granularity") else 1
    return round(copies * total)


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
        planned_optimizer(cfg).group_size(dims),
    ]
    return sum(size > 1 for size in sizes)


def _mtp_embedding(cfg: Config, shape: ModelShape, stage: int) -> int:
    """Bytes of the copy of the embedding on the last stage, where it is not the first."""
    if not shape.trains_mtp or stage == 0 or stage < cfg.dims.pipeline - 1:
        return 0
    rows = padded_vocab_size(shape, cfg.dims) // cfg.dims.tensor
    return rows * shape.hidden_size * ITEMSIZE[cfg.model.dtype]


def _tower_bytes(cfg: Config, shape: ModelShape, stage: int) -> int:
    """Bytes of a frozen vision tower on a rank of a pipeline stage."""
    if shape.vision or not has_tower(cfg, shape, stage):
        return 0
    return tower_weights(cfg.model.path) * ITEMSIZE[cfg.model.dtype]


@dataclass(frozen=True, kw_only=True)
class SharedModel:
    """A reward model on GPUs of ranks, with its bytes on each."""

    ranks: range
    """Ranks on whose GPUs it runs; may end behind the last rank."""
    awake: int
    """Its share of vLLM, while completions are scored."""
    outside: int
    """Memory that it never releases: CUDA context and NCCL buffers."""
    weights: int
    """Weights of its files, which are on the host while it sleeps."""


def shared_models(cfg: Config, card: GpuSpec) -> list[SharedModel]:
    """The reward models of a run that share GPUs; ValueError if one cannot."""
    found: list[SharedModel] = []
    for model in served_here(cfg.rewards.values()):
        if not model.shares_gpus:
            continue
        start, size = found[-1].ranks.stop if found else 0, model.num_gpus
        one = SharedModel(
            ranks=range(start, start + size),
            awake=round(gpu_share(model, cfg.rollout) * card.memory),
            outside=CONTEXT_BYTES + COMMUNICATOR_BYTES * (size > 1),
            weights=file_bytes(model) // size,
        )
        found.append(one)
    return found


def file_bytes(model: RewardFunction) -> int:
    """Bytes of the weight files of a reward model."""
    folder = Path(model.arguments["path"])
    return sum(file.stat().st_size for kind in WEIGHTS for file in folder.glob(kind))
