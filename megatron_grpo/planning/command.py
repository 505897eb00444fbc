"""`megatron-grpo plan`: one plan, two side by side, or suggestions, for people or for scripts."""

import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, get_args

from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.config.config import Config
from megatron_grpo.config.file import load_config
from megatron_grpo.config.offload import Part, Phase, parts_away
from megatron_grpo.config.reward import RewardFunction, served_here
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.planning.advice import flash_lines, idle_lines, less, too_large
from megatron_grpo.planning.card import card_named
from megatron_grpo.planning.engine_memory import EngineBytes, engine_bytes
from megatron_grpo.planning.host import choice_lines, host_blocks
from megatron_grpo.planning.job_plan import (
    JobPlan,
    forecast,
    min_gpus,
    plan_job,
)
from megatron_grpo.planning.memory import StageMemory, file_bytes
from megatron_grpo.planning.rollout_time import mode_of
from megatron_grpo.planning.rows import facts, legend, table
from megatron_grpo.planning.simulation import MODES, Loop, simulate
from megatron_grpo.planning.state import part_bytes
from megatron_grpo.planning.step_time import ATTAINABLE_OF_LINK, LinkUse
from megatron_grpo.planning.suggest import UNKNOWN, suggest, suggestion_table
from megatron_grpo.planning.workload import (
    Job,
    longest_sequence,
    read_completion_lengths,
    read_lengths,
)
from parallel.words import counted

SHOWN_STAGES = 4
STATE: tuple[Part, ...] = ("weights", "gradients", "optimizer", "reference")
COMPARE = "hint: compare with any other setting: --with grpo.shared_prompts=true"
STEP = "step with engines, simulated"
MEASURED = "hint: sequences count as the longest; to count a run's: --lengths RUN/completions.jsonl"


class Plan(NamedTuple):
    """A planned job; its text is that of `megatron-grpo plan`."""

    job: Job
    gpu: str
    figures: JobPlan

    def __repr__(self) -> str:
        return job_table(self.job, self.gpu, self.figures)

    def check(self) -> None:
        """Raise ValueError, naming a layout that fits, if memory is too small."""
        if not self.figures.fits:
            raise ValueError(too_large(self.job, self.figures))


def plan_config(cfg: Config, gpu: str, num_gpus: int | None, lengths: Path | None) -> Plan:
    """Plan `cfg`; raises the errors of `plan_job`."""
    job = _job(cfg, gpu, num_gpus, lengths)
    return Plan(job, gpu, plan_job(job))


def print_plan(
    cfg: Config, *, gpu: str, num_gpus: int | None, lengths_file: Path | None, as_json: bool
) -> None:
    """Print what `cfg` needs; ValueError, naming a layout that fits, if memory is too small."""
    plan = plan_config(cfg, gpu, num_gpus, lengths_file)
    print(json.dumps(plan.figures.as_json()) if as_json else plan, flush=True)
    plan.check()


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
    print(f"{config} on {gpu}\nwith {shlex.join(changes)}\n\nmemory in GB; * differs")
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
        print(suggestion_table(suggestions, job, gpu))
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
        "  idle": f"{plan.gpus.idle:,}",
        "limit of a GPU's memory": _gb(plan.memory_limit),
        "fullest stage": str(stage.stage),
        **{f"  {part}": size for part, size in _parts(cfg, stage).items()},
        **{f"  sum in phase {phase}": _gb(totals.get(phase)) for phase in get_args(Phase)},
        "host memory per node": _gb(plan.host.total if plan.host else None),
        "microbatches per model copy": f"{work.microbatches:,}",
        "tokens per step": f"{work.computed.tokens:,}",
        "padding per step": f"{work.padding:,}",
        "step, least time": _seconds(time.compute_seconds),
        "step, estimate": _seconds(time.estimate),
        "  exposed traffic": _seconds(time.waits),
        "push, least time": _seconds(push.seconds if push else None),
        "generation, least time": _seconds(rollout.seconds if rollout else None),
        STEP: _seconds(forecast(cfg, loop, plan.gpus).seconds / steps if loop else None),
        "engine weights per GPU": _gb(engine.weights if engine else None),
        "engine cache per GPU": _gb(engine.cache if engine else None),
        "cached tokens per engine": f"{engine.cached_tokens:,}" if engine else "-",
    }


def job_table(job: Job, gpu: str, plan: JobPlan) -> str:
    """Blocks for memory, a step, engines, a generation, traffic and asynchrony."""
    cfg, shape, engine = job.cfg, job.shape, plan.engine
    blocks = [
        [
            f"{shape.family} in {cfg.model.dtype} on {plan.num_gpus} {gpu}",
            f"trainer: {cfg.dims}",
            f"engines: {_engines(cfg, plan)}",
            f"GPUs: {plan.gpus}",
            *idle_lines(job, plan),
            *flash_lines(job, gpu),
        ],
        _memory_lines(cfg, plan),
        *host_blocks(cfg, plan.host, plan.fullest, job.card),
        choice_lines(cfg, shape, plan.work.lengths, engine),
        _step_lines(plan),
        facts("engine", _engine_rows(engine)) if engine else [],
        *map(_reward_model_lines, served_here(cfg.rewards.values())),
        _generation_lines(cfg, plan),
        _link_lines(job, plan),
        _asynchrony_lines(cfg, plan.loop) if plan.loop and not plan.gpus.is_shared else [],
        [legend(("tp", "pp", "cp", "dp"))],
        [COMPARE, *([MEASURED] if job.lengths == [longest_sequence(cfg, shape)] else [])],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _engines(cfg: Config, plan: JobPlan) -> str:
    if not cfg.num_engines:
        return "none (train.replay)"
    where = "shared with the trainer" if plan.gpus.is_shared else "on their own GPUs"
    return f"{cfg.num_engines} x {counted(cfg.rollout.gpus_per_engine, 'GPU')}, {where}"


def _memory_lines(cfg: Config, plan: JobPlan) -> list[str]:
    """Rows for the first stages, the last, and the fullest."""
    # Middle stages mostly repeat each other.
    shown = [*plan.stages[:SHOWN_STAGES], plan.fullest, plan.stages[-1]]
    stages = [plan.stages[number] for number in sorted({stage.stage for stage in shown})]
    rows = [["stage", *_parts(cfg, plan.fullest), "at worst in", "sum"]]
    for stage in stages:
        sizes = _parts(cfg, stage).values()
        rows.append([str(stage.stage), *sizes, stage.worst, _gb(stage.total, 1)])
    free = plan.memory_limit - plan.fullest.total
    left_out = len(plan.stages) - len(stages)
    return [
        "GB of a GPU",
        *table(rows, left=(len(rows[0]) - 2,)),
        f"{_gb(plan.memory_limit, 1)} GB limit, {_gb(abs(free), 1)} GB "
        f"{'free' if free >= 0 else 'too much'}",
        *([f"{counted(left_out, 'stage')} not shown, none fuller"] if left_out else []),
    ]


def _step_lines(plan: JobPlan) -> list[str]:
    work, time = plan.work, plan.time
    rows = [
        (f"{len(work.lengths):,}", "sequences"),
        (f"{work.computed.tokens:,}", "tokens"),
        (f"{work.padding:,}", "tokens of padding"),
        (f"{work.microbatches:,}", "microbatches per model copy"),
        (f"{work.computed.tokens / work.room:.1%}", "of them filled with tokens"),
        (f"{time.flops:.3g}", "operations"),
        (f"{time.compute_seconds:.1f} s", "least time, at the GPUs' peak"),
        (
            f"{time.estimate:.1f} s",
            f"estimate, at {time.attainable:g} of the peak and {ATTAINABLE_OF_LINK:g} of the links",
        ),
        (f"{time.waits:.1f} s", "of it exposed traffic"),
        (f"{time.bubble:.3f}", "pipeline bubble, relative to computation"),
    ]
    return [*facts("optimizer step", rows), *_not_counted(plan.not_counted)]


def _not_counted(keys: Iterable[str]) -> list[str]:
    return [f"not counted: {key}" for key in keys]


def _engine_rows(engine: EngineBytes) -> Iterator[tuple[str, str]]:
    yield f"{_gb(engine.weights)} GB", "weights per GPU"
    yield f"{_gb(engine.cache, 1)} GB", "cache per GPU"
    yield f"{engine.cached_tokens:,}", "tokens in the cache"
    if engine.sequence_bytes:
        tokens = engine.sequence_bytes / engine.token_bytes
        yield f"{tokens:,.0f}", "tokens fewer per running sequence, for linear attention"


def _reward_model_lines(model: RewardFunction) -> list[str]:
    owner = "shared with ranks" if model.shares_gpus else "its own"
    return facts(
        f"reward model {model.arguments['path']}",
        [
            (f"{file_bytes(model) / 1e9:.2f} GB", "weights in its files"),
            (f"{model.num_gpus}", f"GPUs of rank 0's node, {owner}"),
        ],
    )


def _generation_lines(cfg: Config, plan: JobPlan) -> list[str]:
    if (time := plan.rollout) is None or plan.loop is None:
        return [UNKNOWN] if plan.engine else []
    steps = BatchSchedule.of(cfg.grpo).updates_per_generation
    bound = (
        f"least time: {time.passes:,} passes over weights, keys and values"
        if time.memory_seconds > time.compute_seconds
        else "least time, at the GPUs' peak"
    )
    rows = [
        (f"{time.completions:,}", "completions"),
        (f"{time.tokens:,}", "tokens"),
        (f"{time.seconds:.1f} s", bound),
    ]
    if time.network_seconds:
        rows.append((f"{time.network_seconds:.1f} s", "of it traffic between an engine's nodes"))
    seconds = forecast(cfg, plan.loop, plan.gpus).seconds / steps
    rows.append((f"{seconds:.1f} s", f"{STEP}"))
    return facts(f"generation, for {counted(steps, 'step')}", rows)


def _link_lines(job: Job, plan: JobPlan) -> list[str]:
    cfg, card = job.cfg, job.card
    uses: list[LinkUse] = list(plan.time.links)
    if plan.push:
        updates = BatchSchedule.of(cfg.grpo).updates_per_generation
        steps = f", 1 step of {updates}" if updates > 1 else ""
        uses.append(replace(plan.push, purpose=f"{plan.push.purpose}{steps}"))
    rows = [["per step and GPU", "bytes", "over", "least time", "exposed"]]
    for use in uses:
        in_node = card.host_link if use.to_host else card.node_link
        over = in_node if use.in_node or use.to_host else "network"
        seconds = f"{use.seconds:.2f} s", f"{use.exposed:.2f} s"
        rows.append([use.purpose, f"{_gb(use.num_bytes)} GB", over, *seconds])
    return table(rows, left=(0, 2))


def _asynchrony_lines(cfg: Config, loop: Loop) -> list[str]:
    """Gain of each `rollout.max_staleness`; a star marks the value in `cfg`."""
    own, updates = mode_of(cfg), BatchSchedule.of(cfg.grpo).updates_per_generation
    head = ["step", "tokens/s", "engines busy", "trainer busy", "staleness", "at worst"]
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
    return [*table(rows, left=(0,)), "simulated; staleness of tokens in generations; * this config"]
