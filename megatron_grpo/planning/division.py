"""Divides the GPUs of a job between ranks and engines, and ranks over the axes of a layout."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from checkpoint_convert import ModelShape
from megatron_grpo.config.config import Config
from megatron_grpo.config.reward import count_gpus, served_here
from megatron_grpo.config.train import ParallelConfig
from megatron_grpo.launch.placement import check_engine_size, check_shared
from megatron_grpo.planning.card import GpuSpec
from megatron_grpo.planning.engine_memory import EngineBytes
from megatron_grpo.planning.job_plan import gpu_use, min_gpus
from megatron_grpo.planning.workload import Job
from parallel import divisors

VIRTUAL_STAGES = (1, 2, 4, 5)


@dataclass(frozen=True, eq=False)
class Division:
    """The GPUs of a job, divided between ranks and engines."""

    cfg: Config
    """With its number of engines, and with its ranks in the simplest layout."""
    colocated: EngineBytes | None
    """An engine that shares GPUs with ranks."""

    @property
    def num_ranks(self) -> int:
        return self.cfg.dims.world_size


def divisions(job: Job, engine: EngineBytes) -> list[Division]:
    """Every division of the GPUs by ascending ranks, and all GPUs for both if they may share."""
    cfg, card, num_gpus = job.cfg, job.card, _without_rewards(job)
    check_engine_size(cfg.rollout, card.per_node)
    size = cfg.rollout.gpus_per_engine
    # Several counts leave the ranks the same whole nodes: the dict keeps the largest.
    engines = {
        _whole_nodes(num_gpus - count * size, card): count
        for count in range(1, (num_gpus - 1) // size + 1)
    }
    found = []
    for num_ranks in sorted(engines):
        divided = on_ranks(_with_num_engines(cfg, engines[num_ranks]), num_ranks)
        with suppress(ValueError):  # they would share GPUs, and must not
            if not gpu_use(divided, card, job.num_gpus).is_shared:
                found.append(Division(divided, None))
    if not cfg.rollout.max_staleness and size <= num_gpus:
        found.append(_shared_division(job, engine))
    return found


def own_division(job: Job, engine: EngineBytes | None) -> Division:
    """Keep the number of engines and give ranks the other GPUs, or all GPUs to both."""
    cfg, card, num_gpus = job.cfg, job.card, _without_rewards(job)
    engines = cfg.num_engines * cfg.rollout.gpus_per_engine
    if engine and cfg.dims.world_size + engines > min_gpus(cfg, card, engine):
        return _shared_division(job, engine)
    if engines >= num_gpus:
        raise ValueError(
            f"the engines of rollout.* take {engines} of {num_gpus} GPUs and leave none for the "
            f"trainer: use --gpus {engines + 1} or more, or "
            f"{'fewer' if cfg.num_engines > 1 else 'smaller'} engines"
        )
    return _placed(job, engine, cfg, _whole_nodes(num_gpus - engines, card))


def _shared_division(job: Job, engine: EngineBytes) -> Division:
    """All GPUs for ranks, and for as many engines as fit."""
    num_gpus, size = _without_rewards(job), job.cfg.rollout.gpus_per_engine
    cfg = _with_num_engines(job.cfg, max(1, _most_engines(num_gpus, size, job.card)))
    return _placed(job, engine, cfg, _whole_nodes(num_gpus, job.card))


def _placed(job: Job, engine: EngineBytes | None, cfg: Config, num_ranks: int) -> Division:
    """Division with the engine that shares GPUs, if one does; ValueError if none may."""
    cfg = on_ranks(cfg, num_ranks)
    if is_shared := gpu_use(cfg, job.card, job.num_gpus).is_shared:
        check_shared(cfg.rollout, num_ranks, job.num_gpus)
    return Division(cfg, engine if is_shared else None)


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


def on_ranks(cfg: Config, num_ranks: int) -> Config:
    """`cfg` with the simplest layout of `num_ranks` ranks: data parallelism only."""
    return cfg.model_copy(update={"parallel": ParallelConfig(data_parallel_size=num_ranks)})


def layouts(job: Job, num_ranks: int) -> Iterator[ParallelConfig]:
    """Every even division of the ranks over the axes; sequence parallelism if tensor is above 1."""
    cfg, shape, card = job.cfg, job.shape, job.card
    others = cfg.parallel.model_dump(exclude_unset=True)
    for tensor in divisors(num_ranks):
        for pipeline in divisors(num_ranks // tensor):
            if tensor > card.per_node or pipeline > shape.num_layers:
                continue
            for context in divisors(num_ranks // tensor // pipeline):
                takes_turns = cfg.parallel.dynamic_context_parallel and context > 1
                for virtual in VIRTUAL_STAGES if pipeline > 1 else (1,):
                    for expert in _experts(shape, card, num_ranks // pipeline):
                        sizes = ParallelConfig(
                            tensor_parallel_size=tensor,
                            pipeline_parallel_size=pipeline,
                            virtual_pipeline_parallel_size=virtual,
                            num_layers_in_first_pipeline_stage=None,
                            num_layers_in_last_pipeline_stage=None,
                            context_parallel_size=context,
                            dynamic_context_parallel=takes_turns,
                            expert_parallel_size=expert,
                            expert_tensor_parallel_size=1 if shape.moe else tensor,
                            data_parallel_size=num_ranks // tensor // pipeline // context,
                            sequence_parallel=tensor > 1,
                        )
                        yield ParallelConfig(**others | sizes.model_dump(exclude_unset=True))


def _experts(shape: ModelShape, card: GpuSpec, stage_size: int) -> list[int]:
    """Numbers of ranks of a stage over which whole experts can be divided; 1 for a dense model."""
    count = shape.moe.num_experts if shape.moe else 1
    return [size for size in divisors(stage_size) if size <= card.per_node and count % size == 0]
