"""Finds the layouts that fit a number of GPUs, fastest step first."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from checkpoint_convert import ModelShape, check_divisible
from megatron_grpo.bars import tracked
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.config.config import Config
from megatron_grpo.config.megatron_fields import check_fp8_model
from megatron_grpo.config.section import Section
from megatron_grpo.config.train import ParallelConfig
from megatron_grpo.planning.card import GpuSpec
from megatron_grpo.planning.division import Division, divisions, layouts, on_ranks, own_division
from megatron_grpo.planning.engine_memory import EngineBytes, engine_bytes
from megatron_grpo.planning.host import host_use
from megatron_grpo.planning.job_plan import (
    forecast,
    gpu_use,
    legal,
    not_counted,
    overrides,
)
from megatron_grpo.planning.memory import (
    StageMemory,
    fullest_stage,
    memory_limit,
    stages_memory,
)
from megatron_grpo.planning.precision import check_fp8_card
from megatron_grpo.planning.rollout_time import rollout_time, training_loop
from megatron_grpo.planning.rows import legend, table
from megatron_grpo.planning.simulation import Forecast
from megatron_grpo.planning.state import StateBytes, stage_states
from megatron_grpo.planning.step_time import StepTime, push_link, step_time
from megatron_grpo.planning.workload import Job, workload
from megatron_grpo.policy.lora_targets import check_lora
from parallel import ParallelDims
from parallel.words import counted

RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SHOWN_SUGGESTIONS = 8
UNKNOWN = "generation, and step with engines: unknown without data.max_prompt_length"
TIMES = "traffic: exposed, part of training; a generation: least time; a step: both, simulated"
IDLE = "hint: for the idle: leave out rollout.num_engines, and set data.max_prompt_length"
NUM_TRIED = 4
"""Divisions of the GPUs that are compared: those with the shortest predicted steps."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A layout that fits."""

    given: Config
    cfg: Config
    """`given` with the layout and its number of engines."""
    memory: StageMemory
    """Memory of the fullest stage."""
    time: StepTime

    @property
    def recomputes(self) -> bool:
        """Whether layers recompute their forward in the backward."""
        return "recompute_granularity" in self.cfg.model.megatron

    @property
    def changes(self) -> dict[str, dict[str, Any]]:
        """Fields in which the config must differ from the given one."""
        fields: dict[str, Iterable[str]] = {
            "parallel": ParallelConfig.model_fields,
            "rollout": ("base_urls", "num_engines"),
            "model": ("megatron",),
        }
        return {
            section: _changed(getattr(self.given, section), getattr(self.cfg, section), names)
            for section, names in fields.items()
        }

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


def _changed(given: Section, wanted: Section, names: Iterable[str]) -> dict[str, Any]:
    """Fields to set so that `given` becomes `wanted`; others follow from them by default."""
    changed: dict[str, Any] = {}
    for name in names:  # in the order of declaration: defaults follow from earlier fields
        fields = given.model_dump(exclude_unset=True) | changed
        value = getattr(wanted, name)
        if getattr(type(given).model_validate(fields), name) != value:
            changed[name] = value
    return changed


def suggest(job: Job) -> list[Suggestion]:
    """Layouts of the trainer that fit the GPUs of a job with its engines, fastest step first.

    Without `rollout.num_engines`, and with `rollout.max_staleness`, ranks and engines divide the
    GPUs as the simulated step is shortest, generation included; in synchronous runs they may also
    share them. Else engines on separate GPUs keep their number and the trainer gets the others,
    while engines that share GPUs fill all. A trainer on several nodes fills them. Layout and
    recomputation change, but not batch and microbatch size. Tensor and expert groups stay within a
    node.

    Raises ValueError if the engines leave no GPU or do not fit theirs, and for problems that no
    layout can solve: a sequence that fits no microbatch, or a batch that does not divide evenly.
    """
    cfg, card = job.cfg, job.card
    check_fp8_card(cfg, card)
    engine = engine_bytes(cfg, job.shape, card)
    if engine and _divides(cfg):
        return _best_division(job, engine)
    return _layouts_on(job, own_division(job, engine))


def _divides(cfg: Config) -> bool:
    """Whether suggestions choose the number of engines."""
    is_given = bool({"num_engines", "base_urls"} & cfg.rollout.model_fields_set)
    is_open = cfg.rollout.max_staleness > 0 or not is_given
    return is_open and cfg.data.max_prompt_length is not None


def simulated(job: Job, cfg: Config, step_seconds: float) -> Forecast | None:
    """Forecast of a job by `cfg`, whose optimizer steps train for `step_seconds`; None without
    engines, or without `data.max_prompt_length`."""
    job, card = replace(job, cfg=cfg), job.card
    if (engine := engine_bytes(cfg, job.shape, card)) is None:
        return None
    push = push_link(engine.pushed, card, in_node=job.num_gpus <= card.per_node)
    loop = training_loop(job, engine, step_seconds, push)
    return forecast(cfg, loop, gpu_use(cfg, card, job.num_gpus)) if loop else None


def _best_division(job: Job, engine: EngineBytes) -> list[Suggestion]:
    """Layouts for the division of the GPUs with the shortest simulated step.

    Training at one number of ranks predicts the others: its time is nearly their inverse.
    """
    found = divisions(job, engine)
    if not found:
        size = job.cfg.rollout.gpus_per_engine
        raise ValueError(
            f"an engine of {job.cfg.rollout.engine_size_text} leaves none of "
            f"{counted(job.num_gpus, 'GPU')} to the trainer: use --gpus {size + 1} or more"
        )

    @cache
    def fitting(division: Division) -> list[Suggestion]:
        return _layouts_on(job, division)

    # Fewer ranks have less room: where none of the larger half fits, none of the others does.
    known = next(filter(fitting, found[len(found) // 2 :]), None)
    if known is None:
        return []
    ranks_times_seconds = known.num_ranks * fitting(known)[0].time.estimate

    def seconds(division: Division, training: float) -> float:
        run = simulated(job, division.cfg, training)
        assert run, "engines generate for prompts of a known length"
        return run.seconds

    likely = sorted(found, key=lambda each: seconds(each, ranks_times_seconds / each.num_ranks))
    tried = [each for each in likely[:NUM_TRIED] if fitting(each)]
    best = min(tried or [known], key=lambda each: seconds(each, fitting(each)[0].time.estimate))
    return fitting(best)


def _layouts_on(job: Job, division: Division) -> list[Suggestion]:
    """Layouts of the division's ranks that fit, fastest first."""
    shape, found, states = job.shape, [], dict[ParallelDims, list[StateBytes]]()
    workload(on_ranks(job.cfg, 1), shape, job.lengths)  # what fails here fails in every layout
    for parallel in tracked([*layouts(job, division.num_ranks)], "comparing layouts"):
        candidate = division.cfg.model_copy(update={"parallel": parallel})
        dims = candidate.dims
        try:
            check_divisible(shape, dims)
            check_fp8_model(candidate.model.megatron, shape, dims)
            parallel.check_dispatch(candidate.model.megatron)
            check_lora(candidate.lora, shape, dims.tensor)
            # Data and context ranks share the optimizer state in the same way.
            key = replace(dims, context=1, data=dims.data * dims.context)
            if key not in states:
                states[key] = _fitting_states(candidate, shape, job.card)
            if states[key]:
                each = replace(job, cfg=candidate)
                found += _fitting(each, job.cfg, states[key], division.colocated)
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


def _fitting(
    job: Job, given: Config, states: Sequence[StateBytes], colocated: EngineBytes | None
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
            time = step_time(each, states, work)
            return [Suggestion(given=given, cfg=cfg, memory=memory, time=time)]
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


def suggestion_table(suggestions: Sequence[Suggestion], job: Job, gpu: str) -> str:
    """The fastest layouts, and the command-line overrides for the first of them."""
    first = suggestions[0]
    rows = [_suggestion_row(each, job) for each in suggestions[:SHOWN_SUGGESTIONS]]
    columns = [name for name in rows[0] if rows[0][name] != "-"]
    cells = [columns, *([row[name] for name in columns] for row in rows)]
    use = gpu_use(first.cfg, job.card, job.num_gpus)
    is_fixed = use.idle and use.generating and not _divides(job.cfg)
    words = [f"  {shlex.quote(word)}" for word in first.overrides]
    return "\n".join(
        [
            f"{counted(len(suggestions), 'layout')} for {job.num_gpus} {gpu}, fastest step first",
            f"GPUs: {use}",
            *([IDLE] if is_fixed else []),
            "",
            *table(cells, left=(columns.index("recompute"),)),
            legend(columns),
            *_time_lines(first, job),
            *(f"not counted: {key}" for key in not_counted(first.cfg)),
            "",
            "hint: for the first, add these after the config's name:"
            if words
            else "hint: the config has the first layout",
            " \\\n".join(words),
        ]
    )


def _suggestion_row(each: Suggestion, job: Job) -> dict[str, str]:
    """Cells by column; "-" where there is none."""
    dims, moe = each.cfg.dims, job.shape.moe
    steps = BatchSchedule.of(each.cfg.grpo).updates_per_generation
    engine = engine_bytes(each.cfg, job.shape, job.card)
    rollout = rollout_time(replace(job, cfg=each.cfg), engine) if engine else None
    whole = simulated(job, each.cfg, each.time.estimate)
    return {
        "tp": str(dims.tensor),
        "pp": str(dims.pipeline),
        "vp": str(dims.virtual_pipeline),
        "cp": str(dims.context),
        "dp": str(dims.data),
        "ep": str(dims.expert) if moe else "-",
        "recompute": "full" if each.recomputes else "none",
        "memory": f"{each.memory.total / 1e9:.1f} GB",
        "bubble": f"{each.time.bubble:.3f}",
        "traffic": f"{each.time.waits:.1f} s",
        "training": f"{each.time.estimate:.1f} s",
        "a generation": f"{rollout.seconds:.1f} s" if rollout else "-",
        "a step": f"{whole.seconds / steps:.1f} s" if whole else "-",
    }


def _time_lines(first: Suggestion, job: Job) -> list[str]:
    """Meaning of the times, and how busy the first suggestion keeps ranks and engines."""
    if not first.cfg.num_engines:
        return []
    if (run := simulated(job, first.cfg, first.time.estimate)) is None:
        return [UNKNOWN]
    busy = f"engines {run.engines_busy:.0%} of the time, ranks {run.trainer_busy:.0%}"
    return [TIMES, f"busy, with the first layout: {busy}"]
