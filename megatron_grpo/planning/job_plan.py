"""Plans a whole job: what it computes, sends and holds, and whether that fits its GPUs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

from megatron_grpo.config.config import Config
from megatron_grpo.config.megatron_fields import DEEPEP_RANKS
from megatron_grpo.config.reward import count_gpus, served_here
from megatron_grpo.config.section import as_yaml
from megatron_grpo.launch.placement import check_engine_size, check_shared, place
from megatron_grpo.planning.advice import Changes, check_job, legal, overrides, with_megatron
from megatron_grpo.planning.block import uses_transformer_engine
from megatron_grpo.planning.card import GpuSpec
from megatron_grpo.planning.engine_memory import EngineBytes, engine_bytes
from megatron_grpo.planning.host import HostUse, host_use
from megatron_grpo.planning.memory import (
    StageMemory,
    fullest_stage,
    memory_limit,
    rounded_weights,
    stages_memory,
)
from megatron_grpo.planning.precision import has_fp8, without_fp8
from megatron_grpo.planning.rollout_time import RolloutTime, rollout_time, training_loop
from megatron_grpo.planning.simulation import MODES, Loop, simulate
from megatron_grpo.planning.state import StateBytes, stage_states
from megatron_grpo.planning.step_time import LinkUse, StepTime, push_link, step_time
from megatron_grpo.planning.workload import Job, Workload, workload
from parallel.alignment import round_up

FLEX_CAPABILITY = (9, 0)
"""Compute capability that DeepEP asks for."""


@dataclass(frozen=True, kw_only=True)
class PromptSharing:
    """An optimizer step with or without `grpo.shared_prompts`."""

    filled_tokens: int
    """Tokens of all microbatches, alignment included."""
    estimate_seconds: float


@dataclass(frozen=True, kw_only=True)
class Fp8Change:
    """Effect of `model.megatron.fp8`."""

    weights: int
    """Bytes of weights in FP8 during a pass, on the fullest stage."""
    bfloat16_memory: int
    """Memory of the fullest stage without it."""
    bfloat16_estimate_seconds: float


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """Needs of a config on GPUs of one kind."""

    num_gpus: int
    is_shared: bool
    """Whether trainer and engines use the same GPUs."""
    memory_limit: int
    """Bytes per card that may be used."""
    work: Workload
    stages: Sequence[StageMemory]
    engine: EngineBytes | None
    """None if rollouts do not come from vLLM, or are replayed."""
    time: StepTime
    rollout: RolloutTime | None
    """Time of one generation; None without an `engine`, or if the length of prompts is unknown."""
    overlaps: Mapping[str, float]
    """Settings with which a step would wait less for traffic, and by how many seconds."""
    push: LinkUse | None
    """The push of weights for one generation, which may serve several steps."""
    share_prompts: Callable[[], dict[bool, PromptSharing]]
    """Computes `shared_prompts`, which takes longer than all of the rest."""
    not_counted: Sequence[str]
    """See `not_counted`."""
    host: HostUse | None
    """None if neither ranks nor engines leave anything to their hosts."""
    loop: Loop | None
    """None like `rollout`, and if trainer and engines use the same GPUs, where they take turns."""
    fp8: Fp8Change | None

    @property
    def fullest(self) -> StageMemory:
        return fullest_stage(self.stages)

    @property
    def fits(self) -> bool:
        """Whether no GPU, and no node, runs out of memory."""
        return self.fits_gpus and (self.host is None or self.host.fits)

    @property
    def fits_gpus(self) -> bool:
        return self.fullest.total <= self.memory_limit

    @cached_property
    def shared_prompts(self) -> dict[bool, PromptSharing]:
        """The step without `grpo.shared_prompts`, and with it if the length of prompts is known."""
        return self.share_prompts()

    @property
    def shares_tokens(self) -> bool:
        """Whether `grpo.shared_prompts` makes, or would make, a step shorter."""
        filled = [step.filled_tokens for step in self.shared_prompts.values()]
        return min(filled) < max(filled)

    def as_json(self) -> dict[str, Any]:
        """All figures for scripts, in bytes, seconds and operations."""
        return {
            "num_gpus": self.num_gpus,
            "is_shared": self.is_shared,
            "memory_limit": self.memory_limit,
            "fits": self.fits,
            "not_counted": self.not_counted,
            "workload": {
                "sequences": len(self.work.lengths),
                "tokens": sum(self.work.lengths),
                "computed_tokens": self.work.computed.tokens,
                "padding": self.work.padding,
                "microbatches": self.work.microbatches,
            },
            "shared_prompts": {
                str(is_on).lower(): asdict(step) for is_on, step in self.shared_prompts.items()
            },
            "stages": [stage.as_json() for stage in self.stages],
            "engine": self.engine and asdict(self.engine),
            "step": asdict(self.time) | {"estimate_seconds": self.time.estimate},
            "rollout": self.rollout and asdict(self.rollout) | {"seconds": self.rollout.seconds},
            "overlaps": self.overlaps,
            "push": self.push and asdict(self.push),
            "asynchrony": self.loop
            and [asdict(mode) | asdict(simulate(self.loop, mode)) for mode in MODES],
            "host": self.host and asdict(self.host) | {"total": self.host.total},
        } | ({"fp8": asdict(self.fp8)} if self.fp8 else {})


def plan_job(job: Job) -> JobPlan:
    """Plan a job; raises ValueError, with a legal value, for anything that cannot be split, placed,
    packed or loaded."""
    cfg, shape, card = job.cfg, job.shape, job.card
    check_job(job)
    engine = engine_bytes(cfg, shape, card)
    num_gpus = job.num_gpus or min_gpus(cfg, card, engine)
    if is_shared := shares_gpus(cfg, card, num_gpus):
        check_shared(cfg.rollout, cfg.dims.world_size, num_gpus)
    colocated = engine if is_shared else None
    in_node = num_gpus <= card.per_node
    work, states = workload(cfg, shape, job.lengths), list(stage_states(cfg, shape))
    time = step_time(job, states, work)
    push = push_link(engine.pushed, card, in_node=in_node) if engine else None
    stages = stages_memory(job, states, work.microbatches, colocated)
    loop = None
    if engine and push and not is_shared:
        loop = training_loop(job, engine, time, push)
    return JobPlan(
        num_gpus=num_gpus,
        is_shared=is_shared,
        memory_limit=memory_limit(card),
        work=work,
        stages=stages,
        engine=engine,
        time=time,
        rollout=rollout_time(job, engine) if engine else None,
        overlaps=_overlaps(job, states, work, time),
        push=push,
        share_prompts=partial(_shared_prompts, job, states),
        not_counted=not_counted(cfg),
        host=host_use(job, states, work.microbatches, colocated),
        loop=loop,
        fp8=_fp8_change(job, states, colocated, fullest_stage(stages).stage),
    )


def _fp8_change(
    job: Job, states: Sequence[StateBytes], colocated: EngineBytes | None, fullest: int
) -> Fp8Change | None:
    if not has_fp8(job.cfg):
        return None
    plain = replace(job, cfg=without_fp8(job.cfg))
    work = workload(plain.cfg, job.shape, job.lengths)
    stages = stages_memory(plain, states, work.microbatches, colocated)
    return Fp8Change(
        weights=rounded_weights(job.cfg, job.shape, fullest, backward=True),
        bfloat16_memory=fullest_stage(stages).total,
        bfloat16_estimate_seconds=step_time(plain, states, work).estimate,
    )


def _shared_prompts(job: Job, states: Sequence[StateBytes]) -> dict[bool, PromptSharing]:
    steps = {}
    for is_on in [False, True] if job.cfg.data.max_prompt_length is not None else [False]:
        if (other := legal(job, {"grpo": {"shared_prompts": is_on}})) is None:
            continue
        work = workload(other.cfg, job.shape, job.lengths)
        time = step_time(other, states, work)
        steps[is_on] = PromptSharing(filled_tokens=work.filled, estimate_seconds=time.estimate)
    return steps


def _overlaps(
    job: Job, states: Sequence[StateBytes], work: Workload, time: StepTime
) -> dict[str, float]:
    others = {
        way: step_time(other, states, work).estimate
        for way, changes in _ways(job.cfg, job.card).items()
        if (other := legal(job, changes)) is not None
    }
    return {way: gain for way, other in others.items() if (gain := time.estimate - other) > 0}


def _ways(cfg: Config, card: GpuSpec) -> dict[str, Changes]:
    """Changes that may hide traffic, by their overrides."""
    switches: Changes = {"parallel": {"overlap_grad_reduce": True, "overlap_param_gather": True}}
    ways = {" ".join(overrides(switches)): switches}
    fields: dict[str, object] = {"moe_shared_expert_overlap": True}
    can_flex = cfg.dims.expert * cfg.dims.expert_tensor in DEEPEP_RANKS
    if can_flex and uses_transformer_engine(cfg) and card.capability >= FLEX_CAPABILITY:
        fields["moe_token_dispatcher_type"] = "flex"
    for name, value in fields.items():
        ways[f"model.megatron.{name}={as_yaml(value)}"] = with_megatron(cfg, **{name: value})
    return ways


def not_counted(cfg: Config) -> list[str]:
    """Keys that `cfg` turns on but figures leave out: they are those of a run without them."""
    is_counted = cfg.data.max_prompt_length is not None
    shared = ["grpo.shared_prompts"] if cfg.grpo.shared_prompts and not is_counted else []
    offload = ["optimizer.optimizer_cpu_offload"] if cfg.optimizer.optimizer_cpu_offload else []
    return shared + offload


def shares_gpus(cfg: Config, card: GpuSpec, num_gpus: int) -> bool:
    """Whether ranks and engines of a job share its GPUs when placed by `place`.

    Raises ValueError if the GPUs are too few, or if nodes of this card cannot hold the ranks or the
    engines.
    """
    ranks, engines = cfg.dims.world_size, cfg.num_engines * cfg.rollout.gpus_per_engine
    of_rewards = count_gpus(served_here(cfg.rewards.values()), shared=False)
    if engines:
        check_engine_size(cfg.rollout, card.per_node)
    least = max(ranks, engines) + of_rewards
    if least > num_gpus:
        reward_models = f", and reward models {of_rewards}" if of_rewards else ""
        raise ValueError(
            f"{cfg.dims} needs {ranks} GPUs, and {cfg.num_engines} engines of "
            f"{cfg.rollout.engine_size_text} need {engines}{reward_models}, but the job has "
            f"{num_gpus} in all; use --gpus {least} or more"
        )
    nodes = [str(number) for number in range(-(-num_gpus // card.per_node))]
    placed = place(cfg, nodes, min(num_gpus, card.per_node))
    # A job may have only part of its last node, which `place` does not take into account.
    return placed.shares_gpus or ranks + engines + of_rewards > num_gpus


def min_gpus(cfg: Config, card: GpuSpec, engine: EngineBytes | None) -> int:
    """GPUs of the fewest whole nodes that hold the job; part of one node if that is enough.

    Ranks and engines take the same nodes, unless one `engine` alone fills what a plan may use of a
    card, or generations are made ahead. An engine of more GPUs than a node has takes whole nodes.
    Reward models that do not share GPUs have theirs behind the ranks.
    """
    size, num_engines = cfg.rollout.gpus_per_engine, cfg.num_engines
    rank_nodes = -(-cfg.dims.world_size // card.per_node)
    if size > card.per_node:
        engine_nodes = num_engines * (size // card.per_node)
    else:
        engine_nodes = -(-num_engines // (card.per_node // size))
    # An engine starts at a multiple of its size.
    behind = cfg.dims.world_size + count_gpus(served_here(cfg.rewards.values()), shared=False)
    apart = round_up(behind, size if num_engines else 1) + num_engines * size
    if cfg.rollout.max_staleness or (engine and engine.total > memory_limit(card)):
        return apart if apart <= card.per_node else (rank_nodes + engine_nodes) * card.per_node
    nodes = max(rank_nodes, engine_nodes)
    return min(apart, card.per_node) if nodes == 1 else nodes * card.per_node
