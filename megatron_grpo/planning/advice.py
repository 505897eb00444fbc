"""Advice where a plan does not fit: only changes that the checks of a config accept."""

import shlex
from contextlib import suppress
from dataclasses import replace

from checkpoint_convert import ModelShape
from megatron_grpo.config.config import Config
from megatron_grpo.config.vision import mrope_axes
from megatron_grpo.engines.arguments import PLANNED, engine_number
from megatron_grpo.planning.block import uses_transformer_engine
from megatron_grpo.planning.job_plan import (
    Changes,
    JobPlan,
    gpu_use,
    legal,
    overrides,
    plan_job,
)
from megatron_grpo.planning.suggest import suggest
from megatron_grpo.planning.workload import Job
from parallel.words import counted

NEEDS_FLASH = "{gpu}: no packed sequences in cuDNN, Transformer Engine needs flash-attn"
LOCAL = "hint: without flash-attn: model.megatron.transformer_impl=local"
LESS_ON_HOSTS = {
    "reward models that sleep, with share_gpus": "share_gpus=false, for GPUs of their own",
    "model.megatron.offload_modules": "fewer model.megatron.offload_modules",
}
"""Changes named without a trial, by the entry of `HostUse.parts` that takes most."""


def flash_lines(job: Job, gpu: str) -> list[str]:
    """Lines if flash-attn is needed, with the setting that avoids it where that is legal."""
    if job.card.packs_sequences or _has_own_attention(job.cfg, job.shape):
        return []
    local = {"model": {"megatron": {**job.cfg.model.megatron, "transformer_impl": "local"}}}
    return [NEEDS_FLASH.format(gpu=gpu), *([LOCAL] if legal(job, local) else [])]


def _has_own_attention(cfg: Config, shape: ModelShape) -> bool:
    """Whether attention is not Transformer Engine's: see `fused_layer_spec`."""
    return (
        not uses_transformer_engine(cfg)
        or cfg.grpo.shared_prompts
        or bool(mrope_axes(cfg))
        or shape.has_sinks
        or (cfg.dims.context > 1 and shape.window is not None)
    )


def idle_lines(job: Job, plan: JobPlan) -> list[str]:
    """Ways to use idle GPUs; no line without such GPUs."""
    if not (idle := plan.gpus.idle):
        return []
    cfg, num_gpus = job.cfg, plan.num_gpus
    engines = cfg.num_engines + idle // cfg.rollout.gpus_per_engine
    copies = cfg.dims.data + idle // (cfg.dims.world_size // cfg.dims.data)
    ways: list[Changes] = [{"parallel": {"data_parallel_size": copies}}]
    ways += [{"rollout": {"num_engines": engines}}] if cfg.num_engines else []
    found = []
    for changes in ways:
        with suppress(ValueError):  # no place for them
            other = legal(job, changes)
            if other and gpu_use(other.cfg, job.card, num_gpus).idle < idle:
                found += overrides(changes)
    return [f"hint: for the idle: {', or '.join([*found, f'--suggest --gpus {num_gpus}'])}"]


def too_large(job: Job, plan: JobPlan) -> str:
    """Say why a plan does not fit, and what would: another place for state, another layout."""
    job = replace(job, num_gpus=plan.num_gpus)
    text, starts = _lack(plan), [(job, list[str]())]
    fits = False
    if place := _other_place(job, plan):
        other, words, changed = place
        starts.append((other, words))
        if fits := changed.fits:
            text += f"\nhint: fits with {' '.join(words)}"
    for start, words in starts:
        try:
            suggestions = suggest(start)
        except ValueError as error:
            return f"{text}\n{error}"
        if suggestions:
            pasted = shlex.join([*words, *suggestions[0].overrides])
            return f"{text}\nhint: fastest layout that fits: {pasted}"
        if fits:
            return text
    return f"{text}\nno layout fits on {counted(plan.num_gpus, 'GPU')}: {less(job, plan)}"


def _lack(plan: JobPlan) -> str:
    if plan.host and not plan.host.fits:
        return plan.host.need
    stage = plan.fullest
    return (
        f"a GPU of stage {stage.stage} needs {stage.total / 1e9:.1f} GB in phase {stage.worst}, "
        f"but may use {plan.memory_limit / 1e9:.1f}"
    )


def _other_place(job: Job, plan: JobPlan) -> tuple[Job, list[str], JobPlan] | None:
    """(job, overrides, plan) of the change in `_places` that needs least of a GPU; None if none
    helps or hosts have no room."""
    found = []
    for changes in _places(job.cfg):
        if (other := legal(job, changes)) is not None:
            found.append((other, overrides(changes), plan_job(other)))
    helpful = [
        (other, words, changed)
        for other, words, changed in found
        if changed.fits_hosts
        and (not plan.fits_hosts or changed.fullest.total < plan.fullest.total)
    ]
    return min(helpful, key=lambda each: each[2].fullest.total, default=None)


def _places(cfg: Config) -> tuple[Changes, ...]:
    """Changes that move state or weights between GPUs and hosts."""
    # Communicators may leave a GPU only where weights do.
    stay = {"offload_communicators": False} if cfg.train.offload_communicators else {}
    return (
        {"train": {"offload": "all"}},
        *({"train": {"offload": offload, **stay}} for offload in ("optimizer", "none")),
        {"lora": {"sync": "merged"}},
    )


def less(job: Job, plan: JobPlan | None = None) -> str:
    """Advice where no layout fits; `plan` is the plan of the config's own layout."""
    ways = ["use more GPUs"]
    if plan and plan.host and not plan.fits_hosts:
        largest = max(plan.host.parts, key=plan.host.parts.__getitem__)
        ways += [LESS_ON_HOSTS[largest]] if largest in LESS_ON_HOSTS else []
    if plan is None or not plan.fits_gpus:
        ways += _less_on_gpus(job)
    *others, last = ways
    return f"{', '.join(others)}, or {last}" if others else last


def _less_on_gpus(job: Job) -> list[str]:
    """Settings to lower. A microbatch must hold the longest sequence."""
    rollout, ways = job.cfg.rollout, list[str]()
    longest, room = max(job.lengths), job.cfg.train.max_tokens_per_microbatch
    if longest < room:
        ways.append(
            f"a train.max_tokens_per_microbatch below {room} (the longest sequence has {longest})"
        )
    else:
        ways.append(f"shorter sequences than {longest} tokens (rollout.max_completion_length)")
    # Engines that generate ahead have GPUs of their own: a smaller share gives ranks nothing.
    if job.cfg.num_engines and not rollout.max_staleness:
        given = engine_number(rollout, "kv_cache_memory_bytes")
        fraction = PLANNED[rollout.engine].memory_fraction
        ways.append(
            f"a lower rollout.{rollout.engine}.{'kv_cache_memory_bytes' if given else fraction}"
        )
    return ways
