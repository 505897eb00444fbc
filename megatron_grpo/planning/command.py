"""`megatron-grpo plan`: one plan, two side by side, or suggestions, for people or for scripts."""

import json
import shlex
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.config.config import Config
from megatron_grpo.config.file import load_config
from megatron_grpo.config.offload import Part, Phase, parts_away
from megatron_grpo.config.reward import RewardFunction, served_here
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.planning.advice import flash_lines, less, too_large
from megatron_grpo.planning.card import card_named
from megatron_grpo.planning.engine_memory import EngineBytes, engine_bytes
from megatron_grpo.planning.host import choice_lines, host_lines
from megatron_grpo.planning.job_plan import JobPlan, min_gpus, not_counted, plan_job
from megatron_grpo.planning.memory import StageMemory, file_bytes
from megatron_grpo.planning.rollout_time import RolloutTime, mode_of
from megatron_grpo.planning.simulation import MODES, Forecast, Loop, simulate
from megatron_grpo.planning.state import part_bytes
from megatron_grpo.planning.step_time import ATTAINABLE_OF_LINK, LinkUse
from megatron_grpo.planning.suggest import Suggestion, simulated, suggest
from megatron_grpo.planning.workload import (
    Job,
    longest_sequence,
    read_completion_lengths,
    read_lengths,
)

SHOWN_STAGES = 4
SHOWN_SUGGESTIONS = 8
STATE: tuple[Part, ...] = ("weights", "gradients", "optimizer", "reference")
NOT_COUNTED = "microbatches, operations, times and traffic are those of a run without"
COMPARE = (
    "compare with any other setting: --with KEY=VALUE, such as --with grpo.shared_prompts=true"
)


def print_plan(
    cfg: Config, *, gpu: str, num_gpus: int | None, lengths_file: Path | None, as_json: bool
) -> None:
    """Print what `cfg` needs; ValueError, naming a layout that fits, if memory is too small."""
    job = _job(cfg, gpu, num_gpus, lengths_file)
    plan = plan_job(job)
    print(json.dumps(plan.as_json()) if as_json else job_table(job, gpu, plan), flush=True)
    if not plan.fits:
        raise ValueError(too_large(job, plan))


def print_comparison(
    cfg: Config,
    config: Path,
    overrides: Sequence[str],
    changes: Sequence[str],
    *,
    gpu: str,
    num_gpus: int | None,
    lengths_file: Path | None,
    as_json: bool,
) -> None:
    """Print two columns: the plan of `cfg` (file `config` with `overrides`), and with `changes`.
    ValueError, naming the changes, if they are refused."""
    plan = plan_job(_job(cfg, gpu, num_gpus, lengths_file))
    try:
        other = load_config(config, [*overrides, *changes])
        other.model.check_folder(only_config=True)
        changed = plan_job(_job(other, gpu, num_gpus, lengths_file))
    except ValueError as error:
        raise ValueError(f"--with {shlex.join(changes)}: {error}") from None
    if as_json:
        print(json.dumps({"config": plan.as_json(), "with": changed.as_json()}))
        return
    columns = _figures(cfg, plan), _figures(other, changed)
    rows = [["", "as it is", "with", ""]]
    for label, *cells in zip(columns[0], *(each.values() for each in columns), strict=True):
        if {*cells} != {"-"}:
            rows.append([label, *cells, "*" if len({*cells}) > 1 else ""])
    print(f"{config} on {gpu}, and with {shlex.join(changes)}; memory in GB, * differs\n")
    print("\n".join(table(rows, left=(0, 3))))


def print_suggestions(
    cfg: Config, *, gpu: str, num_gpus: int | None, lengths_file: Path | None, as_json: bool
) -> None:
    """Print layouts that fit; ValueError if none does."""
    job = _job(cfg, gpu, num_gpus, lengths_file)
    num_gpus = num_gpus or min_gpus(cfg, job.card, engine_bytes(cfg, job.shape, job.card))
    job = replace(job, num_gpus=num_gpus)
    suggestions = suggest(job)
    if as_json:
        print(json.dumps([each.as_json() for each in suggestions]))
    elif suggestions:
        print(suggestion_table(suggestions, num_gpus, gpu))
        if forecast := simulated(suggestions[0], job):
            print(f"\n{_forecast_line(suggestions[0].cfg, forecast)}")
    if not suggestions:
        raise ValueError(f"no layout fits on {num_gpus} {gpu}: {less(job)}")


def _job(cfg: Config, gpu: str, num_gpus: int | None, lengths: Path | None) -> Job:
    card, shape = card_named(gpu), trained_shape(cfg)
    if lengths is None:
        found = [longest_sequence(cfg, shape)]
    elif lengths.suffix == ".jsonl":
        found = read_completion_lengths(lengths, cfg)
    else:
        found = read_lengths(lengths)
    return Job(cfg, shape, card, found, num_gpus or 0)


def table(rows: Sequence[Sequence[str]], left: Container[int] = ()) -> list[str]:
    """Pad cells to columns, aligned to the left in columns `left`; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = ["<" if number in left else ">" for number in range(len(widths))]
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, aligned, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def _gb(num_bytes: float | None, digits: int = 2) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e9:.{digits}f}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"


def _parts(cfg: Config, stage: StageMemory) -> dict[str, str]:
    """GB of each part on a GPU of the stage, in its worst phase."""
    away = parts_away(cfg.train.offload, stage.worst)
    state = {part: 0 if part in away else part_bytes(stage.state, [part]) for part in STATE}
    others = stage.buffers, stage.engine, stage.phases[stage.worst]
    return {part: _gb(size, 3) for part, size in state.items()} | dict(
        zip(("buffers", "engine", "temporary"), map(_gb, others), strict=True)
    )


def _figures(cfg: Config, plan: JobPlan) -> dict[str, str]:
    """Figures by which two plans are compared; "-" where a plan has none."""
    stage, work, time = plan.fullest, plan.work, plan.time
    engine, push, rollout, loop = plan.engine, plan.push, plan.rollout, plan.loop
    steps = BatchSchedule.of(cfg.grpo).updates_per_generation
    totals = {phase: stage.total_in(phase) for phase in stage.phases}
    return {
        "fits": "yes" if plan.fits else "no",
        "GPUs": f"{plan.num_gpus:,}",
        "memory that a GPU may use": _gb(plan.memory_limit),
        "fullest stage": str(stage.stage),
        **{f"  {part}": size for part, size in _parts(cfg, stage).items()},
        **{f"  sum in phase {phase}": _gb(totals.get(phase)) for phase in get_args(Phase)},
        "memory of a node's host": _gb(plan.host.total if plan.host else None),
        "microbatches of a model copy": f"{work.microbatches:,}",
        "tokens of a step": f"{work.computed.tokens:,}",
        "tokens of padding": f"{work.padding:,}",
        "a step, at least": _seconds(time.compute_seconds),
        "a step, estimated": _seconds(time.estimate),
        "  traffic that is not hidden": _seconds(time.waits),
        "a push, at least": _seconds(push.seconds if push else None),
        "a generation, at least": _seconds(rollout.seconds if rollout else None),
        "a step beside engines, simulated": _seconds(
            simulate(loop, mode_of(cfg)).seconds / steps if loop else None
        ),
        "weights of an engine, per GPU": _gb(engine.weights if engine else None),
        "cache of an engine, per GPU": _gb(engine.cache if engine else None),
        "tokens that an engine caches": f"{engine.cached_tokens:,}" if engine else "-",
    }


def job_table(job: Job, gpu: str, plan: JobPlan) -> str:
    """The memory of every kind of stage, the work of a step, and the traffic over each link."""
    cfg, shape = job.cfg, job.shape
    title = (
        f"{shape.family} in {cfg.model.dtype} on {plan.num_gpus} {gpu}: trainer {cfg.dims}; "
        f"{_engines(cfg, plan)}"
    )
    blocks = [
        [title, *flash_lines(job, gpu)],
        _memory_lines(cfg, plan),
        [
            *host_lines(cfg, plan.host, plan.fullest, job.card),
            *choice_lines(cfg, shape, plan.work.lengths, plan.engine),
        ],
        _work_lines(cfg, plan),
        _link_lines(cfg, plan),
        _asynchrony_lines(cfg, plan.loop) if plan.loop else [],
        [COMPARE],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _engines(cfg: Config, plan: JobPlan) -> str:
    if not cfg.num_engines:
        return "no engines, for train.replay"
    where = "on the same GPUs" if plan.is_shared else "on GPUs of their own"
    size = _count(cfg.rollout.gpus_per_engine, "GPU")
    return f"{_count(cfg.num_engines, 'engine')} of {size}, {where}"


def _memory_lines(cfg: Config, plan: JobPlan) -> list[str]:
    """Rows for the first stages, the last, and the fullest."""
    shown = [*plan.stages[:SHOWN_STAGES], plan.fullest, plan.stages[-1]]
    stages = [plan.stages[number] for number in sorted({stage.stage for stage in shown})]
    rows = [["stage", *_parts(cfg, plan.fullest), "most in phase", "sum"]]
    for stage in stages:
        sizes = _parts(cfg, stage).values()
        rows.append([str(stage.stage), *sizes, stage.worst, _gb(stage.total, 1)])
    free = plan.memory_limit - plan.fullest.total
    verdict = f"{_gb(abs(free), 1)} GB {'free' if free >= 0 else 'too much'}"
    left_out = len(plan.stages) - len(stages)
    others = f"; not shown, and no fuller: {_count(left_out, 'stage')}" if left_out else ""
    limit = _gb(plan.memory_limit, 1)
    return [
        *table(rows, left=(len(rows[0]) - 2,)),
        f"all in GB; a GPU may use {limit}: {verdict}{others}",
    ]


def _work_lines(cfg: Config, plan: JobPlan) -> list[str]:
    work, time, engine = plan.work, plan.time, plan.engine
    lines = [
        f"an optimizer step: {_count(len(work.lengths), 'sequence')}, {work.computed.tokens:,} "
        f"tokens in {_count(work.microbatches, 'microbatch')} per model copy, "
        f"{work.computed.tokens / work.room:.1%} full, "
        f"{work.padding:,} tokens of padding",
        *(f"{key}: {NOT_COUNTED}" for key in plan.not_counted),
        f"{time.flops:.3g} operations: at least {time.compute_seconds:.1f} s at the cards' peak; "
        f"estimate {time.estimate:.1f} s, at {time.attainable:g} of the peak and "
        f"{ATTAINABLE_OF_LINK:g} of the links' rates, with a pipeline bubble of {time.bubble:.3f} "
        f"and {time.waits:.1f} s of traffic that computation does not hide",
    ]
    if engine:
        lines.append(
            f"an engine has {engine.weights / 1e9:.2f} GB of weights and "
            f"{engine.cache / 1e9:.1f} GB for keys and values on each GPU: "
            f"{engine.cached_tokens:,} tokens at once{_memory_words(engine)}"
        )
    if plan.rollout:
        lines.append(_rollout_line(cfg, plan.rollout))
    return lines + [_reward_model_line(model) for model in served_here(cfg.rewards.values())]


def _memory_words(engine: EngineBytes) -> str:
    if not engine.sequence_bytes:
        return ""
    tokens = engine.sequence_bytes / engine.token_bytes
    return f", of which linear attention's memory of a sequence takes the place of {tokens:,.0f}"


def _reward_model_line(model: RewardFunction) -> str:
    whose = "that it shares" if model.shares_gpus else "of its own"
    return (
        f"the reward model {model.arguments['path']} has {file_bytes(model) / 1e9:.2f} GB of "
        f"weights in its files, for {_count(model.num_gpus, 'GPU')} {whose} on the node of rank 0"
    )


def _rollout_line(cfg: Config, time: RolloutTime) -> str:
    bound = (
        f"an engine reads its weights {time.passes:,} times, and the keys and values, from memory"
        if time.memory_seconds > time.compute_seconds
        else "computing it takes, at the cards' peak"
    )
    if time.network_seconds:
        bound += f", and its nodes exchange hidden states for {time.network_seconds:.1f} s"
    steps = BatchSchedule.of(cfg.grpo).updates_per_generation
    return (
        f"a generation, for {_count(steps, 'step')}: "
        f"{_count(time.completions, 'completion')}, {time.tokens:,} tokens, by "
        f"{_count(cfg.rollout.num_engines, 'engine')}: at least {time.seconds:.1f} s, in which "
        f"{bound}"
    )


def _link_lines(cfg: Config, plan: JobPlan) -> list[str]:
    uses: list[LinkUse] = list(plan.time.links)
    if plan.push:
        updates = BatchSchedule.of(cfg.grpo).updates_per_generation
        steps = f", 1 step of {updates}" if updates > 1 else ""
        uses.append(replace(plan.push, purpose=f"{plan.push.purpose}{steps}"))
    rows = [["per step and GPU", "bytes", "over", "least time", "exposed"]]
    for use in uses:
        over = "PCIe" if use.to_host else "NVLink" if use.in_node else "network"
        seconds = f"{use.seconds:.2f} s", f"{use.exposed:.2f} s"
        rows.append([use.purpose, f"{_gb(use.num_bytes)} GB", over, *seconds])
    return table(rows, left=(0, 2))


def _asynchrony_lines(cfg: Config, loop: Loop) -> list[str]:
    """Gain of each `rollout.max_staleness`; a star marks that of `cfg`."""
    own, updates = mode_of(cfg), BatchSchedule.of(cfg.grpo).updates_per_generation
    head = ["step", "tokens/s", "engines", "trainer", "staleness", "largest"]
    rows = [["rollout.max_staleness", *head]]
    for mode in sorted({*MODES, own}, key=lambda mode: (mode.max_staleness, mode.in_flight)):
        forecast = simulate(loop, mode)
        rows.append(
            [
                f"{mode}{' *' if mode == own else ''}",
                f"{forecast.seconds / updates:.1f} s",
                f"{forecast.tokens_per_second:,.0f}",
                f"{forecast.engines_busy:.0%}",
                f"{forecast.trainer_busy:.0%}",
                f"{forecast.staleness_mean:.2f}",
                str(forecast.staleness_max),
            ]
        )
    note = (
        "simulated; engines and trainer: busy; staleness of tokens, in generations; * this config"
    )
    return [*table(rows, left=(0,)), note]


def suggestion_table(suggestions: Sequence[Suggestion], num_gpus: int, gpu: str) -> str:
    """The fastest layouts, and the command-line overrides for the first of them."""
    head = ["tp", "pp", "vp", "cp", "dp", "ep", "recompute", "memory", "step", "bubble", "traffic"]
    rows = [head, *map(_suggestion_row, suggestions[:SHOWN_SUGGESTIONS])]
    return "\n".join(
        [
            f"layouts that fit on {num_gpus} {gpu}: {len(suggestions)}, the fastest by estimate "
            "first:",
            "",
            *table(rows, left=(head.index("recompute"),)),
            *(f"{key}: {NOT_COUNTED}" for key in not_counted(suggestions[0].cfg)),
            "",
            "to use the first, add these after the config's name:",
            " \\\n".join(f"  {shlex.quote(word)}" for word in suggestions[0].overrides),
        ]
    )


def _suggestion_row(each: Suggestion) -> list[str]:
    dims = each.cfg.dims
    sizes: Iterable[int] = (
        dims.tensor,
        dims.pipeline,
        dims.virtual_pipeline,
        dims.context,
        dims.data,
        dims.expert,
    )
    return [
        *map(str, sizes),
        "full" if each.recomputes else "none",
        f"{_gb(each.memory.total, 1)} GB",
        f"{each.time.estimate:.1f} s",
        f"{each.time.bubble:.3f}",
        f"{each.time.waits:.1f} s",
    ]


def _forecast_line(cfg: Config, forecast: Forecast) -> str:
    seconds = forecast.seconds / BatchSchedule.of(cfg.grpo).updates_per_generation
    return (
        f"simulated with the first and {_count(cfg.rollout.num_engines, 'engine')}: a step takes "
        f"{seconds:.1f} s, in which engines are busy {forecast.engines_busy:.0%} of the time and "
        f"the trainer {forecast.trainer_busy:.0%}"
    )


def _count(number: int, noun: str) -> str:
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{plural}"
