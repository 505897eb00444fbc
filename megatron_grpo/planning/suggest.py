"""Finds the trainer layouts that fit a number of GPUs, fastest by estimate first."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from checkpoint_convert import ModelShape, check_divisible
from megatron_grpo.bars import tracked
from megatron_grpo.config.config import Config
from megatron_grpo.config.megatron_fields import check_fp8_model
from megatron_grpo.config.reward import count_gpus, served_here
from megatron_grpo.config.train import ParallelConfig
from megatron_grpo.launch.placement import check_shared
from megatron_grpo.planning.card import GpuSpec
from megatron_grpo.planning.engine_memory import EngineBytes, engine_bytes
from megatron_grpo.planning.host import host_use
from megatron_grpo.planning.job_plan import (
    legal,
    min_gpus,
    not_counted,
    overrides,
    shares_gpus,
)
from megatron_grpo.planning.memory import (
    StageMemory,
    fullest_stage,
    memory_limit,
    stages_memory,
)
from megatron_grpo.planning.precision import check_fp8_card
from megatron_grpo.planning.rollout_time import mode_of, training_loop
from megatron_grpo.planning.simulation import Forecast, simulate
from megatron_grpo.planning.state import StateBytes, stage_states
from megatron_grpo.planning.step_time import StepTime, push_link, step_time
from megatron_grpo.planning.workload import Job, workload
from megatron_grpo.policy.lora_targets import check_lora
from parallel import divisors
from parallel.words import counted

RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
VIRTUAL_STAGES = (1, 2, 4, 5)


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A layout that fits."""

    cfg: Config
    memory: StageMemory
    """Memory of the fullest stage."""
    time: StepTime

    @property
    def recomputes(self) -> bool:
        """Whether layers recompute their forward in the backward."""
        return "recompute_granularity" in self.cfg.model.megatron

    @property
    def changes(self) -> dict[str, dict[str, Any]]:
        """Changes to the config."""
        given = self.cfg.parallel.model_dump(exclude_unset=True)
        rollout: dict[str, Any] = {"num_engines": n} if (n := self.cfg.num_engines) else {}
        if "base_urls" in self.cfg.rollout.model_fields_set and not self.cfg.rollout.base_urls:
            rollout["base_urls"] = []
        model = {"megatron": self.cfg.model.megatron}
        return {"parallel": given, "rollout": rollout, "model": model}

    @property
    def overrides(self) -> list[str]:
        """Arguments to write after the config's name on the command line."""
        return overrides(self.changes)

    def as_json(self) -> dict[str, object]:
        """The suggestion for scripts."""
        return {
            "overrides": self.overrides,
            "memory": self.memory.as_json(),
            "step": asdict(self.time) | {"estimate_seconds": self.time.estimate},
            "not_counted": not_counted(self.cfg),
        }


def suggest(job: Job) -> list[Suggestion]:
    """Layouts of the trainer that fit the GPUs of a job with its engines, fastest first.

    With `rollout.max_staleness`, the number of engines has the shortest simulated step. Without,
    engines on separate GPUs keep their number and the trainer gets the other GPUs, while engines
    that share GPUs fill all. A trainer on several nodes fills them. Layout and recomputation
    change, but not batch and microbatch size. Tensor and expert groups stay within a node.

    Raises ValueError if the engines leave no GPU or do not fit theirs, and for problems that no
    layout can solve: a sequence that fits no microbatch, or a batch that does not divide evenly.
    """
    cfg, card = job.cfg, job.card
    check_fp8_card(cfg, card)
    engine = engine_bytes(cfg, job.shape, card)
    if cfg.rollout.max_staleness and engine and cfg.data.max_prompt_length is not None:
        return _best_split(job)
    cfg, num_ranks = _with_engines(job, engine)
    if is_shared := shares_gpus(_on_ranks(cfg, num_ranks), card, job.num_gpus):
        check_shared(cfg.rollout, num_ranks, job.num_gpus)
    return _on_ranks_of(replace(job, cfg=cfg), num_ranks, engine if is_shared else None)


def simulated(each: Suggestion, job: Job) -> Forecast | None:
    """Forecast of a job with a suggestion; None on shared GPUs or without `training_loop`."""
    job, card = replace(job, cfg=each.cfg), job.card
    engine = engine_bytes(each.cfg, job.shape, card)
    if not engine or shares_gpus(each.cfg, card, job.num_gpus):
        return None
    push = push_link(engine.pushed, card, in_node=job.num_gpus <= card.per_node)
    loop = training_loop(job, engine, each.time, push)
    return simulate(loop, mode_of(each.cfg)) if loop else None


def _best_split(job: Job) -> list[Suggestion]:
    """Layouts for the number of engines with the shortest simulated step.

    The more ranks, and so the fewer engines, the less the ranks are busy. The best number is near
    the one where engines become the busier side, which bisection finds.
    """
    splits, rollout = _splits(job), job.cfg.rollout
    if not splits:
        raise ValueError(
            f"an engine of {rollout.engine_size_text} leaves none of "
            f"{counted(job.num_gpus, 'GPU')} to the trainer: use --gpus "
            f"{rollout.gpus_per_engine + 1} or more"
        )

    @cache
    def tried(at: int) -> tuple[list[Suggestion], Forecast | None]:
        split, num_ranks = splits[at]
        found = _on_ranks_of(replace(job, cfg=split), num_ranks, None)
        return found, simulated(found[0], job) if found else None

    def engines_are_busier(at: int) -> bool:
        forecast = tried(at)[1]
        return forecast is not None and forecast.engines_busy >= forecast.trainer_busy

    def seconds(at: int) -> float:
        forecast = tried(at)[1]
        return forecast.seconds if forecast else math.inf

    numbers = range(len(splits))
    middle = bisect_left(numbers, True, key=engines_are_busier)
    # Equally busy is not exactly fastest: compare the neighbours.
    return tried(min(numbers[max(middle - 2, 0) : middle + 2], key=seconds))[0]


def _splits(job: Job) -> list[tuple[Config, int]]:
    """(config with its engines, ranks) for every split of the GPUs, by ascending ranks."""
    cfg, card, num_gpus = job.cfg, job.card, _without_rewards(job)
    size = cfg.rollout.gpus_per_engine
    # Several counts leave the ranks the same whole nodes: the dict keeps the largest.
    engines = {
        _whole_nodes(num_gpus - count * size, card): count
        for count in range(1, (num_gpus - 1) // size + 1)
    }
    found = []
    for num_ranks in sorted(engines):
        split = _with_num_engines(cfg, engines[num_ranks])
        if not shares_gpus(_on_ranks(split, num_ranks), card, job.num_gpus):
            found.append((split, num_ranks))
    return found


def _on_ranks_of(job: Job, num_ranks: int, colocated: EngineBytes | None) -> list[Suggestion]:
    """Layouts of `num_ranks` that fit, fastest first."""
    cfg, shape = job.cfg, job.shape
    workload(_on_ranks(cfg, 1), shape, job.lengths)  # what fails here fails in every layout
    found, states = [], {}
    for parallel in tracked([*_layouts(job, num_ranks)], "comparing layouts"):
        candidate = cfg.model_copy(update={"parallel": parallel})
        dims = candidate.dims
        try:
            check_divisible(shape, dims)
            check_fp8_model(cfg.model.megatron, shape, dims)
            parallel.check_dispatch(cfg.model.megatron)
            check_lora(cfg.lora, shape, dims.tensor)
            # Data and context ranks share the optimizer state in the same way.
            key = replace(dims, context=1, data=dims.data * dims.context)
            if key not in states:
                states[key] = _fitting_states(candidate, shape, job.card)
            if states[key]:
                found += _fitting(replace(job, cfg=candidate), states[key], colocated)
        except ValueError:  # this layout cannot split the model, or aligns too much; another may
            continue
    return sorted(
        (each for each in found if legal(job, each.changes)), key=lambda each: each.time.estimate
    )


def _fitting_states(cfg: Config, shape: ModelShape, card: GpuSpec) -> list[StateBytes]:
    """State of each stage; empty if the state of one stage alone exceeds the card."""
    states = []
    for state in stage_states(cfg, shape):
        if state.total > memory_limit(card):
            return []
        states.append(state)
    return states


def _with_engines(job: Job, engine: EngineBytes | None) -> tuple[Config, int]:
    """(config with its number of engines on the job's GPUs, number of trainer ranks)."""
    cfg, card, num_gpus = job.cfg, job.card, _without_rewards(job)
    size = cfg.rollout.gpus_per_engine
    engines = cfg.num_engines * size
    if cfg.dims.world_size + engines > min_gpus(cfg, card, engine):  # they share
        cfg = _with_num_engines(cfg, max(1, _most_engines(num_gpus, size, card)))
        return cfg, _whole_nodes(num_gpus, card)
    if engines >= num_gpus:
        raise ValueError(
            f"the engines of rollout.* take {engines} of {num_gpus} GPUs and leave none for the "
            f"trainer: use --gpus {engines + 1} or more, or "
            f"{'fewer' if cfg.num_engines > 1 else 'smaller'} engines"
        )
    return cfg, _whole_nodes(num_gpus - engines, card)


def _without_rewards(job: Job) -> int:
    """GPUs of the job for ranks and engines, without those that only reward models use."""
    return job.num_gpus - count_gpus(served_here(job.cfg.rewards.values()), shared=False)


def _with_num_engines(cfg: Config, number: int) -> Config:
    """`cfg` with `number` engines that the run itself starts."""
    started: dict[str, Any] = {"base_urls": ()} if cfg.rollout.base_urls else {}
    rollout = cfg.rollout.model_copy(update={"num_engines": number} | started)
    return cfg.model_copy(update={"rollout": rollout})


def _most_engines(num_gpus: int, size: int, card: GpuSpec) -> int:
    """Number of engines of `size` GPUs that fit: several on a node, or each on whole nodes."""
    if size > card.per_node:
        return num_gpus // size
    on_nodes = -(-num_gpus // card.per_node) * (min(num_gpus, card.per_node) // size)
    return min(num_gpus // size, on_nodes)


def _whole_nodes(num_gpus: int, card: GpuSpec) -> int:
    """The most ranks that these GPUs can have: part of one node, or only full nodes."""
    return num_gpus if num_gpus < card.per_node else num_gpus // card.per_node * card.per_node


def _on_ranks(cfg: Config, num_ranks: int) -> Config:
    """`cfg` with the simplest layout of `num_ranks` ranks: data parallelism only."""
    return cfg.model_copy(update={"parallel": ParallelConfig(data_parallel_size=num_ranks)})


def _fitting(
    job: Job, states: Sequence[StateBytes], colocated: EngineBytes | None
) -> list[Suggestion]:
    """The least recomputation with which the job fits; empty if it does not fit at all."""
    for settings in _recomputations(job.cfg):
        model = job.cfg.model.model_copy(update={"megatron": settings})
        cfg = job.cfg.model_copy(update={"model": model})
        each = replace(job, cfg=cfg)
        # Not packed yet: no schedule has more than 2 x pipeline microbatches in flight.
        host = host_use(each, states, 2 * cfg.dims.pipeline, colocated)
        if host is not None and not host.fits:
            continue
        # Packing takes longest, so first rule out what does not even fit with one microbatch.
        limit = memory_limit(job.card)
        if fullest_stage(stages_memory(each, states, 1, colocated)).total > limit:
            continue
        work = workload(cfg, job.shape, job.lengths)
        memory = fullest_stage(stages_memory(each, states, work.microbatches, colocated))
        if memory.total <= limit:
            return [Suggestion(cfg=cfg, memory=memory, time=step_time(each, states, work))]
    return []


def _recomputations(cfg: Config) -> list[dict[str, object]]:
    """Settings of `model.megatron` without recomputation, then with full recomputation, which
    leaves no activations to offload."""
    others = {
        name: value
        for name, value in cfg.model.megatron.items()
        if not name.startswith("recompute_")
    }
    alone = {name: value for name, value in others.items() if "offload" not in name}
    return [others, alone | RECOMPUTED]


def _layouts(job: Job, num_ranks: int) -> Iterator[ParallelConfig]:
    """Every division of the ranks over the axes, with sequence parallelism if tensor is above 1.

    `sequence_parallel` is set only if the config has the other value, and uneven stages are unset.
    """
    cfg, shape, card = job.cfg, job.shape, job.card
    ends = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    even: dict[str, Any] = {n: None for n in ends if getattr(cfg.parallel, n) is not None}
    for tensor in divisors(num_ranks):
        is_other = cfg.parallel.sequence_parallel != (tensor > 1)
        said = {"sequence_parallel": tensor > 1} if is_other else {}
        for pipeline in divisors(num_ranks // tensor):
            if tensor > card.per_node or pipeline > shape.num_layers:
                continue
            for context in divisors(num_ranks // tensor // pipeline):
                takes_turns = cfg.parallel.dynamic_context_parallel
                turns = {"dynamic_context_parallel": context > 1} if takes_turns else {}
                for virtual in VIRTUAL_STAGES if pipeline > 1 else (1,):
                    for expert in _experts(shape, card, num_ranks // pipeline):
                        yield ParallelConfig(
                            tensor_parallel_size=tensor,
                            pipeline_parallel_size=pipeline,
                            virtual_pipeline_parallel_size=virtual,
                            context_parallel_size=context,
                            data_parallel_size=num_ranks // tensor // pipeline // context,
                            expert_parallel_size=expert,
                            expert_tensor_parallel_size=1 if shape.moe else tensor,
                            **said,
                            **even,
                            **turns,
                        )


def _experts(shape: ModelShape, card: GpuSpec, stage_size: int) -> list[int]:
    """Numbers of ranks of a stage over which whole experts can be divided; 1 for a dense model."""
    count = shape.moe.num_experts if shape.moe else 1
    return [size for size in divisors(stage_size) if size <= card.per_node and count % size == 0]
