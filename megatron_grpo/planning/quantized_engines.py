"""Engines with weights of 8 bits that a job could have: what they take, and what they gain."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from checkpoint_convert.vllm import engine_sizes
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.config.config import Config
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.engine_weights.layouts import engine_dims
from megatron_grpo.engines.support import WITH_FP8, check_towers_served
from megatron_grpo.launch.placement import check_engine_size
from megatron_grpo.planning.advice import Changes, legal, overrides
from megatron_grpo.planning.engine_memory import EngineBytes, engine_bytes
from megatron_grpo.planning.job_plan import shares_gpus
from megatron_grpo.planning.rollout_time import rollout_time
from megatron_grpo.planning.suggest import Suggestion, simulated
from megatron_grpo.planning.workload import Job, longest_sequence

SCHEMES = ("fp8", "fp8_channel", "int8")
"""Schemes in order of preference: the first that engines can serve the model with is taken."""
CORRECTION = {"rollout_importance_sampling_mode": "token_truncate"}
"""Fields of `grpo` that correct for what quantised engines compute differently."""


@dataclass(frozen=True, kw_only=True)
class EngineOption:
    """Engines beside the ranks of a suggestion."""

    overrides: Sequence[str]
    """Arguments to write behind the config's name; empty: the engines that it has."""
    num_engines: int
    gpus_per_engine: int
    weights: int
    cached_tokens: int
    """As of `EngineBytes`."""
    generation_seconds: float | None
    """The least that a generation takes; None if the length of prompts is unknown."""
    step_seconds: float | None
    """Simulated; None like the former, and where ranks and engines share GPUs."""


def engine_options(suggestion: Suggestion, job: Job) -> list[EngineOption]:
    """The engines of a suggestion, and behind them those of 8 bits that the job could have instead.

    These have as many tensor-parallel ranks, or fewer, if the longest sequence still fits. Engines
    that share GPUs with ranks stay on all of these, and take no more of each. Empty if there are
    none, as of a model whose shapes, attention or other towers refuse it, or if the engines have
    8 bits already.
    """
    cfg, shape, card = suggestion.cfg, job.shape, job.card
    plain = engine_bytes(cfg, shape, card)
    if plain is None or cfg.rollout.quantization != "none":
        return []
    is_shared = shares_gpus(cfg, card, job.num_gpus)
    found = [_option(suggestion, [], plain, job)]
    for other, words in _quantized(replace(job, cfg=cfg), is_shared=is_shared):
        engine = engine_bytes(other, shape, card)
        assert engine is not None, "engines are as before, but for their weights"
        is_larger = is_shared and engine.total > plain.total
        at_once = engine.cached_tokens // cfg.rollout.data_parallel_size  # of a group of an engine
        if at_once >= longest_sequence(cfg, shape) and not is_larger:
            each = replace(suggestion, cfg=other)
            found.append(_option(each, words, engine, job))
    return found if found[1:] else []


def _quantized(job: Job, *, is_shared: bool) -> Iterator[tuple[Config, list[str]]]:
    """For each size of engines, the config with those that are legal, and the overrides that say
    so."""
    cfg, shape, card = job.cfg, job.shape, job.card
    size = cfg.rollout.tensor_parallel_size
    corrections = {} if cfg.grpo.corrects_rollouts else CORRECTION
    for tensor in reversed(engine_sizes(shape, engine_dims(cfg.rollout))):
        if size % tensor:
            continue
        fields: dict[str, Any] = {} if tensor == size else {"tensor_parallel_size": tensor}
        if fields and is_shared:
            fields["num_engines"] = cfg.num_engines * (size // tensor)
        for scheme in SCHEMES if card.capability >= WITH_FP8 else ("int8",):
            sections = {"rollout": {"quantization": scheme, **fields}, "grpo": corrections}
            if (other := _legal(job, sections)) is not None:
                yield other, overrides(sections)
                break


def _legal(job: Job, changes: Changes) -> Config | None:
    """The config with these fields; None if a run would be refused."""
    if (other := legal(job, changes)) is None:
        return None
    cfg = other.cfg
    try:
        check_towers_served(cfg.model, cfg.rollout)
        trained_shape(cfg)
        check_engine_size(cfg.rollout, job.card.per_node)
        engine_bytes(cfg, job.shape, job.card)
    except ValueError:  # another size or scheme may be legal
        return None
    return cfg


def _option(
    suggestion: Suggestion, overrides: Sequence[str], engine: EngineBytes, job: Job
) -> EngineOption:
    cfg = suggestion.cfg
    generation = rollout_time(replace(job, cfg=cfg), engine)
    forecast = simulated(suggestion, job)
    return EngineOption(
        overrides=overrides,
        num_engines=cfg.num_engines,
        gpus_per_engine=cfg.rollout.gpus_per_engine,
        weights=engine.weights,
        cached_tokens=engine.cached_tokens,
        generation_seconds=generation.seconds if generation else None,
        step_seconds=forecast.seconds / BatchSchedule.of(cfg.grpo).updates_per_generation
        if forecast
        else None,
    )
