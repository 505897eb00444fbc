"""`megatron-grpo plan`: a plan, or suggestions, printed for people or for scripts."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.config.config import Config
from megatron_grpo.config.offload import Offload, Part, parts_away
from megatron_grpo.config.reward import RewardFunction, served_here
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.engines.arguments import PLANNED
from megatron_grpo.planning.advice import flash_lines, legal, overrides
from megatron_grpo.planning.card import card_named
from megatron_grpo.planning.engine_memory import EngineBytes, engine_bytes
from megatron_grpo.planning.host import choice_lines, host_lines, too_little_host_memory
from megatron_grpo.planning.job_plan import (
    Fp8Change,
    JobPlan,
    PromptSharing,
    min_gpus,
    not_counted,
    plan_job,
)
from megatron_grpo.planning.memory import StageMemory, file_bytes
from megatron_grpo.planning.quantized_engines import EngineOption, engine_options
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
NOT_COUNTED = "microbatches, operations, times and traffic are those of a run without"
OFFLOADS: tuple[Offload, ...] = ("all", "optimizer")


def job_table(job: Job, gpu: str, plan: JobPlan) -> str:
    """The memory of every kind of stage, the work of a step, and the traffic over each link."""
    cfg, shape = job.cfg, job.shape
    of_host = host_lines(cfg, plan.host, plan.fullest, card_named(gpu))
    of_host += choice_lines(cfg, shape, plan.work.lengths, plan.engine)
    lines = [
        f"{shape.family} in {cfg.model.dtype} on {plan.num_gpus} {gpu}: trainer {cfg.dims}; "
        f"{_engines(cfg, plan)}",
        *flash_lines(job, gpu),
        "",
        *_memory_rows(cfg, plan),
        *(["", *of_host] if of_host else []),
        "",
        *_work_lines(cfg, plan),
        "",
        *_link_rows(cfg, plan),
        *(["", *_asynchrony_rows(cfg, plan.loop)] if plan.loop else []),
    ]
    return "\n".join(lines)


def _engines(cfg: Config, plan: JobPlan) -> str:
    if not cfg.num_engines:
        return "no engines, for train.replay"
    where = "on the same GPUs" if plan.is_shared else "on GPUs of their own"
    size = _count(cfg.rollout.gpus_per_engine, "GPU")
    return f"{_count(cfg.num_engines, 'engine')} of {size}, {where}"


def suggestion_table(suggestions: Sequence[Suggestion], num_gpus: int, gpu: str) -> str:
    """The fastest layouts, and the command-line overrides for the first of them."""
    rows = [
        f"{'tp':>3}{'pp':>4}{'vp':>4}{'cp':>4}{'dp':>5}{'ep':>4}  {'recompute':<10}"
        f"{'memory':>9}{'step':>9}{'bubble':>8}{'traffic':>9}"
    ]
    for each in suggestions[:SHOWN_SUGGESTIONS]:
        dims = each.cfg.dims
        rows.append(
            f"{dims.tensor:>3}{dims.pipeline:>4}{dims.virtual_pipeline:>4}{dims.context:>4}"
            f"{dims.data:>5}{dims.expert:>4}  {'full' if each.recomputes else 'none':<10}"
            f"{each.memory.total / 1e9:>6.1f} GB{each.time.estimate:>7.1f} s"
            f"{each.time.bubble:>8.3f}{each.time.waits:>7.1f} s"
        )
    return "\n".join(
        [
            f"layouts that fit on {num_gpus} {gpu}: {len(suggestions)}, the fastest by estimate "
            "first:",
            "",
            *rows,
            *(f"{key}: {NOT_COUNTED}" for key in not_counted(suggestions[0].cfg)),
            "",
            "to use the first, add these after the config's name:",
            " \\\n".join(f"  {shlex.quote(word)}" for word in suggestions[0].overrides),
        ]
    )


def _memory_rows(cfg: Config, plan: JobPlan) -> list[str]:
    """Rows for the first stages, the last, and the fullest."""
    rows = [
        f"{'stage':>5}{'weights':>9}{'gradients':>11}{'optimizer':>11}{'reference':>11}"
        f"{'buffers':>12}{'engine':>8}{'temporary':>11}  {'most in phase':<18}{'sum':>8}"
    ]
    last = plan.stages[-1]
    shown = [*plan.stages[:SHOWN_STAGES], plan.fullest, last]
    numbers = sorted({stage.stage for stage in shown})
    rows += [_memory_row(cfg, plan.stages[number]) for number in numbers]
    limit, most = plan.memory_limit / 1e9, plan.fullest.total / 1e9
    verdict = f"{limit - most:.1f} GB free" if plan.fits_gpus else f"{most - limit:.1f} GB too much"
    left_out = len(plan.stages) - len(numbers)
    others = f"; not shown, and no fuller: {_count(left_out, 'stage')}" if left_out else ""
    rows.append(f"all in GB; a GPU may use {limit:.1f}: {verdict}{others}")
    if host := max(stage.state.host for stage in plan.stages):
        rows.append(f"the optimizer also takes {host / 1e9:.1f} GB per GPU of its host's memory")
    return rows


def _memory_row(cfg: Config, stage: StageMemory) -> str:
    """Memory of a GPU of the stage in its worst phase, as one row."""
    parts: list[Part] = ["weights", "gradients", "optimizer", "reference"]
    away = parts_away(cfg.train.offload, stage.worst)
    exact = [0 if part in away else part_bytes(stage.state, [part]) for part in parts]
    widths = [9, 11, 11, 11]
    return (
        f"{stage.stage:>5}"
        + "".join(f"{size / 1e9:>{width}.3f}" for size, width in zip(exact, widths, strict=True))
        + f"{stage.buffers / 1e9:>12.1f}{stage.engine / 1e9:>8.1f}"
        + f"{stage.phases[stage.worst] / 1e9:>11.2f}  {stage.worst:<18}{stage.total / 1e9:>8.1f}"
    )


def _work_lines(cfg: Config, plan: JobPlan) -> list[str]:
    work, time, lines = plan.work, plan.time, []
    lines.append(
        f"an optimizer step: {_count(len(work.lengths), 'sequence')}, {work.computed.tokens:,} "
        f"tokens in {_count(work.microbatches, 'microbatch')} per model copy, "
        f"{work.computed.tokens / work.room:.1%} full, "
        f"{work.padding:,} tokens of padding"
    )
    if plan.shares_tokens:
        lines.append(_sharing_line(cfg, plan.shared_prompts[False], plan.shared_prompts[True]))
    lines += [f"{key}: {NOT_COUNTED}" for key in plan.not_counted]
    lines.append(
        f"{time.flops:.3g} operations: at least {time.compute_seconds:.1f} s at the cards' peak; "
        f"estimate {time.estimate:.1f} s, at {time.attainable:g} of the peak and "
        f"{ATTAINABLE_OF_LINK:g} of the links' rates, with a pipeline bubble of {time.bubble:.3f} "
        f"and {time.waits:.1f} s of traffic that computation does not hide"
    )
    if plan.fp8:
        lines.append(_fp8_line(cfg, plan.fp8, plan.fullest))
    if plan.engine:
        lines.append(
            f"an engine has {plan.engine.weights / 1e9:.2f} GB of weights and "
            f"{plan.engine.cache / 1e9:.1f} GB for keys and values on each GPU: "
            f"{plan.engine.cached_tokens:,} tokens at once{_memory_words(plan.engine)}"
        )
    if plan.rollout:
        lines.append(_rollout_line(cfg, plan.rollout))
    return lines + [_reward_model_line(model) for model in served_here(cfg.rewards.values())]


def _fp8_line(cfg: Config, change: Fp8Change, fullest: StageMemory) -> str:
    return (
        f"model.megatron.fp8 {cfg.model.megatron['fp8']}: in bfloat16 the estimate is "
        f"{change.bfloat16_estimate_seconds:.1f} s, and the fullest stage has "
        f"{change.bfloat16_memory / 1e9:.1f} GB instead of {fullest.total / 1e9:.1f}, of which "
        f"{change.weights / 1e9:.2f} are weights in FP8 while a pass lasts"
    )


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


def _sharing_line(cfg: Config, unshared: PromptSharing, shared: PromptSharing) -> str:
    return (
        f"with grpo.shared_prompts=true it {'is' if cfg.grpo.shared_prompts else 'would be'} "
        f"{shared.filled_tokens:,} tokens instead of {unshared.filled_tokens:,}, "
        f"{unshared.filled_tokens / shared.filled_tokens:.2f} times fewer, and by the estimate "
        f"{shared.estimate_seconds:.1f} s instead of {unshared.estimate_seconds:.1f} s, where "
        f"prompts have data.max_prompt_length {cfg.data.max_prompt_length:,}"
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


def _link_rows(cfg: Config, plan: JobPlan) -> list[str]:
    rows = [f"{'per step and GPU':<18}{'bytes':>12}  {'over':<10}{'least time':>10}{'exposed':>10}"]
    rows += [_link_row(use.purpose, use) for use in plan.time.links]
    if plan.push:
        updates = BatchSchedule.of(cfg.grpo).updates_per_generation
        steps = f", 1 step of {updates}" if updates > 1 else ""
        rows.append(_link_row(f"{plan.push.purpose}{steps}", plan.push))
    return rows + [
        f"{way} would save {gain:.2f} s per step"
        for way, gain in plan.overlaps.items()
        if gain >= 0.01
    ]


def _link_row(label: str, use: LinkUse) -> str:
    over = "PCIe" if use.to_host else "NVLink" if use.in_node else "network"
    size = f"{label:<18}{use.num_bytes / 1e9:>9.2f} GB  {over:<10}"
    return f"{size}{use.seconds:>8.2f} s{use.exposed:>8.2f} s"


def _asynchrony_rows(cfg: Config, loop: Loop) -> list[str]:
    """Gain of each `rollout.max_staleness`; a star marks that of `cfg`."""
    own, updates = mode_of(cfg), BatchSchedule.of(cfg.grpo).updates_per_generation
    modes = sorted({*MODES, own}, key=lambda mode: (mode.max_staleness, mode.in_flight))
    return [
        f"{'rollout.max_staleness':<23}{'step':>9}{'tokens/s':>12}{'engines':>9}{'trainer':>9}"
        f"{'staleness':>11}{'largest':>9}",
        *(
            _asynchrony_row(f"{mode}{' *' if mode == own else ''}", updates, simulate(loop, mode))
            for mode in modes
        ),
        "simulated; engines and trainer: busy; staleness of tokens, in generations; * this config",
    ]


def _forecast_line(cfg: Config, forecast: Forecast) -> str:
    seconds = forecast.seconds / BatchSchedule.of(cfg.grpo).updates_per_generation
    return (
        f"simulated with the first and {_count(cfg.rollout.num_engines, 'engine')}: a step takes "
        f"{seconds:.1f} s, in which engines are busy {forecast.engines_busy:.0%} of the time and "
        f"the trainer {forecast.trainer_busy:.0%}"
    )


def _engines_table(cfg: Config, options: Sequence[EngineOption]) -> str:
    """Engines beside the first layout; those of 8 bits with what to add for them."""
    rows = [
        f"{'engines':>7}{'GPUs each':>11}{'weights':>10}{'tokens at once':>16}{'a generation':>14}"
        f"{'a step':>9}  add"
    ]
    for each in options:
        words = " ".join(each.overrides) or "nothing: as they are"
        step = f"{each.step_seconds:.1f} s" if each.step_seconds is not None else "-"
        least = f"{each.generation_seconds:.1f} s" if each.generation_seconds is not None else "-"
        rows.append(
            f"{each.num_engines:>7}{each.gpus_per_engine:>11}{each.weights / 1e9:>7.1f} GB"
            f"{each.cached_tokens:>16,}{least:>14}{step:>9}  {words}"
        )
    corrects = "corrects for that already" if cfg.grpo.corrects_rollouts else "then corrects for it"
    return "\n".join(
        [
            "weights of 8 bits in engines beside the first layout (docs/low-precision.md); a",
            "generation takes at least that, and a step is simulated:",
            "",
            *rows,
            "",
            f"such engines compute other log-probabilities than the ranks: grpo.* {corrects}; "
            "--suggest with the words of a row divides the GPUs anew",
        ]
    )


def _asynchrony_row(label: str, updates: int, forecast: Forecast) -> str:
    return (
        f"{label:<23}{forecast.seconds / updates:>7.1f} s{forecast.tokens_per_second:>12,.0f}"
        f"{forecast.engines_busy:>9.0%}{forecast.trainer_busy:>9.0%}"
        f"{forecast.staleness_mean:>11.2f}{forecast.staleness_max:>9}"
    )


def _count(number: int, noun: str) -> str:
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{plural}"


def print_plan(
    cfg: Config, *, gpu: str, num_gpus: int | None, lengths_file: Path | None, as_json: bool
) -> None:
    """Print what `cfg` needs; ValueError, naming a layout that fits, if memory is too small."""
    job = _job(cfg, gpu, num_gpus, lengths_file)
    plan = plan_job(job)
    table = json.dumps(plan.as_json()) if as_json else job_table(job, gpu, plan)
    print(table, flush=True)
    if not plan.fits:
        raise ValueError(_too_large(replace(job, num_gpus=plan.num_gpus), plan))


def print_suggestions(
    cfg: Config, *, gpu: str, num_gpus: int | None, lengths_file: Path | None, as_json: bool
) -> None:
    """Print layouts that fit; ValueError if none does."""
    job = _job(cfg, gpu, num_gpus, lengths_file)
    num_gpus = num_gpus or min_gpus(cfg, job.card, engine_bytes(cfg, job.shape, job.card))
    job = replace(job, num_gpus=num_gpus)
    suggestions = suggest(job)
    first = suggestions[0] if suggestions else None
    options = engine_options(first, job) if first else []
    if as_json:
        rows = [each.as_json() for each in suggestions]
        for row in rows[:1]:  # beside other layouts a step takes another time
            row["engines"] = [asdict(option) for option in options]
        print(json.dumps(rows))
    elif first:
        print(suggestion_table(suggestions, num_gpus, gpu))
        if forecast := simulated(first, job):
            print(f"\n{_forecast_line(first.cfg, forecast)}")
        if options:
            print(f"\n{_engines_table(first.cfg, options)}")
    if not suggestions:
        ways = ["use more GPUs", _less_work(job)]
        if cfg.num_engines:
            fraction = PLANNED[cfg.rollout.engine].memory_fraction
            ways.append(f"a lower rollout.{cfg.rollout.engine}.{fraction}")
        text = f"{', '.join(ways[:-1])}, or {ways[-1]}"
        raise ValueError(f"no layout fits on {num_gpus} {gpu}: {text}")


def _job(cfg: Config, gpu: str, num_gpus: int | None, lengths: Path | None) -> Job:
    card, shape = card_named(gpu), trained_shape(cfg)
    if lengths is None:
        found = [longest_sequence(cfg, shape)]
    elif lengths.suffix == ".jsonl":
        found = read_completion_lengths(lengths, cfg)
    else:
        found = read_lengths(lengths)
    return Job(cfg, shape, card, found, num_gpus or 0)


def _less_work(job: Job) -> str:
    """Advice that makes activations smaller; a microbatch holds at least the longest sequence."""
    longest, room = max(job.lengths), job.cfg.train.max_tokens_per_microbatch
    if longest < room:
        return (
            f"a train.max_tokens_per_microbatch below {room} (the longest sequence has {longest})"
        )
    return f"shorter sequences than {longest} tokens (rollout.max_completion_length)"


def _too_large(job: Job, plan: JobPlan) -> str:
    if plan.host and not plan.host.fits:
        return too_little_host_memory(job, plan.host)
    stage = plan.fullest
    text = (
        f"a GPU of stage {stage.stage} needs {stage.total / 1e9:.1f} GB in phase {stage.worst}, "
        f"but may use {plan.memory_limit / 1e9:.1f}"
    )
    if offloads := _offloads(job, plan):
        words, freed = offloads
        text += f", and {words} would free {freed / 1e9:.1f}"
    for each in suggest(job)[:1]:
        return f"{text}; the fastest layout that fits: {shlex.join(each.overrides)}"
    return f"{text}; no layout fits on {plan.num_gpus}: use more GPUs, or {_less_work(job)}"


def _offloads(job: Job, plan: JobPlan) -> tuple[str, int] | None:
    """The `train.offload` that frees most bytes of the fullest GPU, and their number; None if
    none is legal and fits the hosts."""
    stage = plan.fullest
    for offload in OFFLOADS:
        freed = part_bytes(stage.state, parts_away(offload, stage.worst)) - stage.away[stage.worst]
        changes = {"train": {"offload": offload}}
        if freed <= 0 or (other := legal(job, changes)) is None:
            continue
        if (host := plan_job(other).host) is None or host.fits:
            return " ".join(overrides(changes)), freed
    return None
