"""`megatron-grpo plan`: a plan, or suggestions, printed for people or for scripts."""

import json
from collections.abc import Sequence
from pathlib import Path

from checkpoint_convert import ModelShape, read_shape
from megatron_grpo.config.config import Config
from megatron_grpo.planning.card import Card, card_named
from megatron_grpo.planning.job_plan import JobPlan, least_gpus, plan_job
from megatron_grpo.planning.job_table import job_table, suggestion_table
from megatron_grpo.planning.memory import engine_bytes
from megatron_grpo.planning.suggest import suggest
from megatron_grpo.planning.workload import longest_sequence, read_lengths


def print_plan(
    cfg: Config, *, gpu: str, num_gpus: int | None, lengths_file: Path | None, as_json: bool
) -> None:
    """Print what `cfg` needs; ValueError, naming a layout that fits, if memory is too small."""
    card, shape = card_named(gpu), read_shape(cfg.model.path)
    lengths = _lengths(cfg, shape, lengths_file)
    plan = plan_job(cfg, shape, card, lengths, num_gpus)
    print(json.dumps(plan.as_json()) if as_json else job_table(cfg, shape, gpu, plan), flush=True)
    if not plan.fits:
        raise ValueError(_too_large(cfg, shape, card, lengths, plan))


def print_suggestions(
    cfg: Config, *, gpu: str, num_gpus: int | None, lengths_file: Path | None, as_json: bool
) -> None:
    """Print layouts that fit; ValueError if none does."""
    card, shape = card_named(gpu), read_shape(cfg.model.path)
    lengths = _lengths(cfg, shape, lengths_file)
    num_gpus = num_gpus or least_gpus(cfg, card, engine_bytes(cfg, shape, card))
    suggestions = suggest(cfg, shape, card, lengths, num_gpus)
    if as_json:
        print(json.dumps([suggestion.as_json() for suggestion in suggestions]))
    elif suggestions:
        print(suggestion_table(suggestions, num_gpus, gpu))
    if not suggestions:
        raise ValueError(
            f"no layout fits on {num_gpus} {gpu}: use more GPUs, {_less_work(cfg, lengths)}, or a "
            "lower rollout.vllm.gpu_memory_utilization"
        )


def _lengths(cfg: Config, shape: ModelShape, file: Path | None) -> list[int]:
    return read_lengths(file) if file else [longest_sequence(cfg, shape)]


def _less_work(cfg: Config, lengths: Sequence[int]) -> str:
    """What makes activations smaller; a microbatch holds at least the longest sequence."""
    longest, room = max(lengths), cfg.train.max_tokens_per_microbatch
    if longest < room:
        return (
            f"a train.max_tokens_per_microbatch below {room} (the longest sequence has {longest})"
        )
    return f"shorter sequences than {longest} tokens (rollout.max_completion_length)"


def _too_large(
    cfg: Config, shape: ModelShape, card: Card, lengths: Sequence[int], plan: JobPlan
) -> str:
    stage = plan.fullest
    text = (
        f"a GPU of stage {stage.stage} needs {stage.total / 1e9:.1f} GB in phase {stage.worst}, "
        f"but may use {plan.memory_limit / 1e9:.1f}"
    )
    for each in suggest(cfg, shape, card, lengths, plan.num_gpus)[:1]:
        return f"{text}; the fastest layout that fits: {' '.join(each.overrides)}"
    return (
        f"{text}; no layout fits on {plan.num_gpus}: use more GPUs, or {_less_work(cfg, lengths)}"
    )
