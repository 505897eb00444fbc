"""Plans a whole job: what it computes, sends and holds, and whether that fits its GPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from checkpoint_convert import check_divisible
from megatron_grpo.config.checks import check_config
from megatron_grpo.config.config import Config
from megatron_grpo.config.megatron_fields import check_fp8_model
from megatron_grpo.config.reward import count_gpus, served_here
from megatron_grpo.config.section import Section, as_yaml
from megatron_grpo.engines.support import check_drafts, check_served, check_towers_served
from megatron_grpo.launch.placement import check_engine_size, check_shared, place
from megatron_grpo.planning.card import GpuSpec
from megatron_grpo.planning.engine_memory import EngineBytes, engine_bytes
from megatron_grpo.planning.host import HostUse, host_use
from megatron_grpo.planning.memory import (
    StageMemory,
    fullest_stage,
    memory_limit,
    stages_memory,
)
from megatron_grpo.planning.precision import check_fp8_card
from megatron_grpo.planning.rollout_time import (
    RolloutTime,
    mode_of,
    rollout_time,
    training_loop,
)
from megatron_grpo.planning.simulation import MODES, Forecast, Loop, Mode, simulate
from megatron_grpo.planning.state import stage_states
from megatron_grpo.planning.step_time import LinkUse, StepTime, push_link, step_time
from megatron_grpo.planning.workload import Job, Workload, workload
from megatron_grpo.policy.lora_targets import check_lora
from parallel.alignment import round_up
from parallel.words import counted

Changes = Mapping[str, Mapping[str, Any]]
"""Fields with other values, by section."""


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """GPUs of a job, by what they do."""

    training: int
    generating: int
    scoring: int
    """GPUs that only reward models use."""
    idle: int
    is_shared: bool
    """Whether ranks and engines use the same GPUs."""

    def __str__(self) -> str:
        generating = f"{self.generating} generate{' on the same' if self.is_shared else ''}"
        uses = [f"{self.training} train", *([generating] if self.generating else [])]
        uses += [f"{self.scoring} score"] if self.scoring else []
        return f"{', '.join(uses)}, {self.idle or 'none'} idle"


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """Needs of a config on GPUs of one kind."""

    num_gpus: int
    gpus: GpuUse
    memory_limit: int
    """Bytes per card that may be used."""
    work: Workload
    stages: Sequence[StageMemory]
    engine: EngineBytes | None
    """None in a replay."""
    time: StepTime
    rollout: RolloutTime | None
    """Time of one generation; None without an `engine`, or if the length of prompts is unknown."""
    push: LinkUse | None
    """The push of weights for one generation, which may serve several steps."""
    not_counted: Sequence[str]
    """See `not_counted`."""
    host: HostUse | None
    """None if neither ranks nor engines leave anything to their hosts."""
    loop: Loop | None
    """None without `rollout`."""

    @property
    def fullest(self) -> StageMemory:
        return fullest_stage(self.stages)

    @property
    def fits(self) -> bool:
        """Whether no GPU, and no node, runs out of memory."""
        return self.fits_gpus and self.fits_hosts

    @property
    def fits_gpus(self) -> bool:
        return self.fullest.total <= self.memory_limit

    @property
    def fits_hosts(self) -> bool:
        return self.host is None or self.host.fits

    @property
    def modes(self) -> Sequence[Mode]:
        """Ways to overlap generations and steps: one on shared GPUs, where they take turns."""
        return MODES[:1] if self.gpus.is_shared else MODES

    def as_json(self) -> dict[str, Any]:
        """All figures for scripts, in bytes, seconds and operations."""
        return {
            "num_gpus": self.num_gpus,
            "is_shared": self.gpus.is_shared,
            "gpus": asdict(self.gpus),
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
            "stages": [stage.as_json() for stage in self.stages],
            "engine": self.engine and asdict(self.engine),
            "step": asdict(self.time) | {"estimate_seconds": self.time.estimate},
            "rollout": self.rollout and asdict(self.rollout) | {"seconds": self.rollout.seconds},
            "push": self.push and asdict(self.push),
            "asynchrony": self.loop
            and [asdict(mode) | asdict(simulate(self.loop, mode)) for mode in self.modes],
            "host": self.host and asdict(self.host) | {"total": self.host.total},
        }


def plan_job(job: Job) -> JobPlan:
    """Plan a job; raises ValueError, with a legal value, for anything that cannot be split, placed,
    packed or loaded."""
    cfg, shape, card = job.cfg, job.shape, job.card
    check_job(job)
    check_towers_served(cfg.model, cfg.rollout)
    engine = engine_bytes(cfg, shape, card)
    num_gpus = job.num_gpus or min_gpus(cfg, card, engine)
    gpus = gpu_use(cfg, card, num_gpus)
    if gpus.is_shared:
        check_shared(cfg.rollout, cfg.dims.world_size, num_gpus)
    colocated = engine if gpus.is_shared else None
    in_node = num_gpus <= card.per_node
    work, states = workload(cfg, shape, job.lengths), list(stage_states(cfg, shape))
    time = step_time(job, states, work)
    push = push_link(engine.pushed, card, in_node=in_node) if engine else None
    return JobPlan(
        num_gpus=num_gpus,
        gpus=gpus,
        memory_limit=memory_limit(card),
        work=work,
        stages=stages_memory(job, states, work.microbatches, colocated),
        engine=engine,
        time=time,
        rollout=rollout_time(job, engine) if engine else None,
        push=push,
        not_counted=not_counted(cfg),
        host=host_use(job, states, work.microbatches, colocated),
        loop=training_loop(job, engine, time.estimate, push) if engine and push else None,
    )


def forecast(cfg: Config, loop: Loop, gpus: GpuUse) -> Forecast:
    """Simulate a run of `cfg`; on shared GPUs ranks and engines take turns."""
    return simulate(loop, MODES[0] if gpus.is_shared else mode_of(cfg))


def check_job(job: Job) -> None:
    """Raise ValueError, with a legal value, if model or card do not support the config."""
    cfg, shape = job.cfg, job.shape
    check_divisible(shape, cfg.dims)
    check_lora(cfg.lora, shape, cfg.dims.tensor)
    check_served(cfg.rollout, shape)
    check_drafts(cfg, shape)
    check_fp8_card(cfg, job.card)
    check_fp8_model(cfg.model.megatron, shape, cfg.dims)


def legal(job: Job, changes: Changes) -> Job | None:
    """The job with `changes`, checked like a config; None if it is refused."""
    sections: dict[str, Section] = {name: getattr(job.cfg, name) for name in changes}
    try:
        fields = {
            name: type(section).model_validate(
                section.model_dump(exclude_unset=True) | dict(changes[name])
            )
            for name, section in sections.items()
        }
        cfg = job.cfg.model_copy(update=fields)
        check_config(cfg)
        check_job(other := replace(job, cfg=cfg))
    except ValueError:
        return None
    return other


def overrides(changes: Changes) -> list[str]:
    """Arguments to paste after the config's name."""
    return [
        f"{section}.{name}={as_yaml(value)}"
        for section, fields in changes.items()
        for name, value in fields.items()
    ]


def not_counted(cfg: Config) -> list[str]:
    """Keys that `cfg` sets but the figures ignore, as in a run without them."""
    is_counted = cfg.data.max_prompt_length is not None
    shared = ["grpo.shared_prompts"] if cfg.grpo.shared_prompts and not is_counted else []
    offload = ["optimizer.optimizer_cpu_offload"] if cfg.optimizer.optimizer_cpu_offload else []
    return shared + offload


def gpu_use(cfg: Config, card: GpuSpec, num_gpus: int) -> GpuUse:
    """Count GPUs of a job whose ranks and engines are placed by `place`.

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
            f"{cfg.dims} needs {counted(ranks, 'GPU')}, the engines ({cfg.num_engines} of "
            f"{cfg.rollout.engine_size_text}) {engines}{reward_models}, but the job has "
            f"{num_gpus} in all; use --gpus "
            f"{min_gpus(cfg, card, None) if cfg.rollout.max_staleness else least} or more"
        )
    nodes = [str(number) for number in range(-(-num_gpus // card.per_node))]
    placed = place(cfg, nodes, min(num_gpus, card.per_node))
    # Engines of `base_urls` have no place.
    used = placed.num_gpus + of_rewards + (engines if cfg.rollout.base_urls else 0)
    return GpuUse(
        training=ranks,
        generating=engines,
        scoring=of_rewards,
        idle=max(0, num_gpus - used),
        # A job may have only part of its last node, which `place` does not take into account.
        is_shared=placed.shares_gpus or ranks + engines + of_rewards > num_gpus,
    )


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
