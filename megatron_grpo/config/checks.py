"""Checks of a whole config, after each section has checked itself.

Only the config is needed here; `preflight.py` checks it against the model and the engines, and
`prompt_checks.py` against the data.
"""

from collections.abc import Iterator
from math import lcm

from megatron_grpo.config.agent import AGENT
from megatron_grpo.config.config import Config
from megatron_grpo.config.conflicts import conflicts
from megatron_grpo.config.eval import EvalConfig, metric_prefix, section_of
from megatron_grpo.config.needs import unmet_needs
from megatron_grpo.config.reward import ENVIRONMENT, judge_mistakes
from megatron_grpo.config.section import Mistake, within
from megatron_grpo.config.sources import OWN_SECTIONS
from parallel.alignment import round_up


def check_config(cfg: Config) -> None:
    """Raise ValueError, one line per mistake in the run or its sources."""
    if found := [*dict.fromkeys(map(str, mistakes_in(cfg)))]:
        raise ValueError("\n".join(found))


def mistakes_in(cfg: Config) -> Iterator[Mistake]:
    """Find the mistakes in the run and its sources."""
    if not cfg.sources.by_name:
        yield from _mistakes(cfg)
        return
    # Sections that sources may override are at their defaults here, since a source checks its own
    # merged sections below, as a run without sources.
    own = {name: type(getattr(cfg, name))() for name in OWN_SECTIONS}
    of_run = [*_mistakes(cfg.model_copy(update=own))]
    yield from of_run
    for name, view in cfg.by_source.items():
        for each in _mistakes(view):
            if str(each) not in map(str, of_run):
                yield _of_source(name, each)
    yield from _source_mistakes(cfg)


def _of_source(name: str, mistake: Mistake) -> Mistake:
    """Name the source of a mistake, also in the keys of its remedies."""
    section = f"sources.by_name.{name}"
    own = [
        within(section, each) if each.startswith(OWN_SECTIONS) else each
        for each in mistake.remedies
    ]
    return Mistake(f"{section}: {mistake}", *own)


def _mistakes(cfg: Config) -> Iterator[Mistake]:
    yield from conflicts(cfg)
    yield from unmet_needs(cfg)
    try:
        cfg.parallel.check_dispatch(cfg.model.megatron)
    except Mistake as mistake:
        yield mistake
    if cfg.train.num_steps is not None:  # else checked when known: see `with_num_steps`
        yield from cfg.optimizer.schedule_mistakes(cfg.train.num_steps)
    if not cfg.sources.by_name:
        yield from _reward_mistakes(cfg)
    yield from _evaluation_mistakes(cfg)
    # Without evaluations it is an unmet need.
    if cfg.train.keep_best is not None and cfg.eval.named_sets:
        yield from _best_mistakes(cfg, cfg.train.keep_best)


def _best_mistakes(cfg: Config, metric: str) -> Iterator[Mistake]:
    """Find a metric that no evaluation has, and evaluations without a checkpoint."""
    known = [
        f"{metric_prefix(name)}{each}"
        for name, held_out in cfg.eval.named_sets.items()
        for each in (*(f"pass@{k}" for k in held_out.k), f"mean@{held_out.num_generations}")
    ]
    if metric not in known:
        yield Mistake(
            f"train.keep_best {metric}: evaluations have {', '.join(known)}",
            f"train.keep_best={known[0]}",
        )
    interval, every = cfg.eval.interval, cfg.train.save_interval
    updates = cfg.grpo.steps_per_generation * cfg.grpo.num_iterations
    if interval % (both := lcm(every, updates)):
        legal = round_up(interval, both)
        yield Mistake(
            f"train.keep_best {metric} needs a checkpoint after each evaluation, and they are "
            f"written every {every} steps (train.save_interval), between generations of {updates}: "
            f"set eval.interval to {legal}, or lower train.save_interval",
            f"eval.interval={legal}",
        )


def _reward_mistakes(cfg: Config) -> Iterator[Mistake]:
    """Find a reward without terms, or with two of the same name."""
    for section, reward in cfg.rewards.items():
        labels = [function.label for function in reward.functions]
        if not any(term.weight for term in cfg.terms_of(reward)) and not labels:
            yield Mistake(
                f"{section}.functions is empty: name at least 1, such as [exact], or an environment"
            )
        if cfg.partner in labels:
            yield Mistake(
                f"{section}.functions names {cfg.partner}, the name of the {cfg.partner}'s own "
                "reward: rename the function"
            )
    name, known = cfg.grpo.dynamic_sample_reward, [term.label for term in cfg.reward_terms]
    if name is not None and name not in known:
        yield Mistake(
            f"grpo.dynamic_sample_reward {name}: the reward has no such term, use "
            f"{', '.join(known)}, or null for their weighted sum",
            "grpo.dynamic_sample_reward=null",
        )


def _evaluation_mistakes(cfg: Config) -> Iterator[Mistake]:
    """Find keys that no evaluation uses, and pass thresholds that shaped rewards could cross."""
    idle = [name for name, value in cfg.eval if value != getattr(EvalConfig(), name)]
    if not cfg.eval.named_sets and idle:
        yield Mistake(
            f"eval.{idle[0]} does nothing without eval.data or eval.sets: name held-out "
            "prompts, such as eval.data.path=FILE or eval.data.split=test, or set eval={} to "
            "evaluate nothing",
            "eval={}",
        )
    for name, held_out in cfg.eval.named_sets.items():
        reward, section = held_out.reward or cfg.reward, section_of(name)
        if "pass_threshold" not in held_out.model_fields_set:
            yield from judge_mistakes(cfg.terms_of(reward), held_out.pass_threshold, section)
        bounds = reward.clip_range
        if bounds is not None and held_out.pass_threshold > bounds[1]:
            yield Mistake(
                f"{section}.pass_threshold {held_out.pass_threshold} is above all rewards, "
                f"which are clipped to {[*bounds]}: lower it, or set "
                f"{section}.reward.clip_range=null",
                f"{section}.reward.clip_range=null",
            )
        if held_out.data and held_out.data.image_column and cfg.data.image_column is None:
            yield Mistake(
                f"{section}.data.image_column needs data.image_column, too: the run itself has no "
                "images"
            )


def _source_mistakes(cfg: Config) -> Iterator[Mistake]:
    """Find sources that one run cannot combine."""
    views, limit = cfg.by_source, cfg.reward.max_failed_fraction
    listening = [name for name, view in views.items() if view.agent.listen is not None]
    if len(listening) > 1:
        yield Mistake(
            f"sources.by_name.{listening[0]} and {listening[1]} both have agent.listen, and "
            "agents.json has one address: let one source listen"
        )
    for name, view in views.items():
        if view.reward.max_failed_fraction != limit:
            yield Mistake(
                f"sources.by_name.{name}.reward.max_failed_fraction is a limit of the whole run "
                f"({limit:g}): set reward.max_failed_fraction",
                f"sources.by_name.{name}.reward.max_failed_fraction={limit:g}",
            )
        labels = {function.label for function in view.reward.functions}
        if cfg.has_dialogues and (taken := labels & {AGENT, ENVIRONMENT}):
            yield Mistake(
                f"sources.by_name.{name}.reward has a function called {min(taken)}, the name of "
                "the reward of dialogues in metrics: give it another name"
            )
