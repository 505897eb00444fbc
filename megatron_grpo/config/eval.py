"""Held-out prompts: the keys of `eval`."""

import re
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any, Self

from pydantic import (
    Field,
    PositiveInt,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from megatron_grpo.config.data import DataConfig
from megatron_grpo.config.reward import RewardConfig
from megatron_grpo.config.rollout import MIN_TEMPERATURE
from megatron_grpo.config.section import Mistake, Section, completed, without_inherited

SET_NAME = re.compile(r"[\w-]+", re.ASCII)
NOT_OF_A_SET = ("data", "interval", "sets")
"""Keys of `eval` that its sets do not inherit."""


class EvalSet(Section):
    """Held-out prompts, and how they are sampled and scored in training and by the command.

    No gradient is taken of these samples, so sampling may be truncated or greedy.
    """

    data: DataConfig | None = None
    """Held-out prompts: the keys of `data`, which also gives their defaults; null: none.
    A run without evaluations has eval={}."""
    reward: RewardConfig | None = None
    """Scoring: the keys of `reward`, which also gives their defaults; null: `reward` itself."""
    max_prompts: PositiveInt | None = None
    """Maximum prompts to evaluate, from the beginning of the data; null: all."""
    num_generations: PositiveInt = 1
    """Completions per prompt: the n of pass@k and mean@n."""
    k: tuple[PositiveInt, ...] = Field(
        strict=False, default_factory=lambda data: tuple(sorted({1, data["num_generations"]}))
    )
    """Values of k in pass@k, each at most num_generations; default: 1 and num_generations."""
    pass_threshold: float = 1.0
    """Weighted sum of rewards from which a completion passes; required with several functions, a
    shaping function or a weight below 1."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature, 0 (greedy) or at least 0.01; null: rollout.temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the likeliest tokens with this total probability; 1: all tokens."""
    top_k: int = -1
    """Sample from this many likeliest tokens; -1: all tokens."""
    max_completion_length: PositiveInt | None = None
    """Maximum tokens per completion, including the end token; null:
    rollout.max_completion_length."""

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        if too_many := [k for k in self.k if k > self.num_generations]:
            raise Mistake(
                f"k {too_many[0]} is above num_generations {self.num_generations}: raise that to "
                f"{max(too_many)}, or lower k",
                f"num_generations={max(too_many)}",
            )
        if self.temperature == 0 and self.num_generations > 1:
            raise Mistake(
                f"temperature 0 makes num_generations {self.num_generations} identical "
                "completions of a prompt: use num_generations 1, or a temperature above 0",
                "num_generations=1",
            )
        if self.temperature is not None and 0 < self.temperature < MIN_TEMPERATURE:
            raise Mistake(
                f"temperature {self.temperature} would be raised to {MIN_TEMPERATURE}: use 0, "
                f"or at least {MIN_TEMPERATURE}",
                "temperature=0",
            )
        if self.top_k < 1 and self.top_k != -1:
            raise ValueError(f"top_k {self.top_k}: use -1 for all tokens, or at least 1")
        return self

    @field_validator("data", mode="after")
    @classmethod
    def _rows_keep_their_order(cls, value: DataConfig | None) -> DataConfig | None:
        if value is not None and not isinstance(value.path, str):
            raise ValueError(
                "data.path is a list, whose weights are for training: give one path, such as "
                "eval.data.path=FILE, or several sets in eval.sets"
            )
        if value is not None and value.shuffle:
            raise Mistake(
                "data.shuffle true: prompts of an evaluation keep the order of their rows; leave "
                "it out",
                "data.shuffle=false",
            )
        return value


class EvalConfig(EvalSet):
    """When to evaluate, and on one set of held-out prompts, or several by name."""

    interval: PositiveInt = 10
    """Optimizer steps between evaluations; the run also evaluates before the first step and after
    the last."""
    sets: dict[str, EvalSet] = Field(default={})
    """Several sets by name, instead of `data`: each has the keys of `eval` except interval and
    sets, with their values here as defaults; a null set is left out. Metrics are `eval/NAME/*`."""

    @field_validator("sets", mode="after")
    @classmethod
    def _sets_are_named(cls, value: dict[str, EvalSet]) -> dict[str, EvalSet]:
        for name, held_out in value.items():
            if not SET_NAME.fullmatch(name):
                raise ValueError(
                    f"sets has the name {name!r}, which becomes part of metrics: use letters, "
                    "digits, - and _, such as aime24"
                )
            if held_out.data is None:
                raise ValueError(
                    f"sets.{name} has no held-out prompts: give {section_of(name)}.data.path=FILE"
                )
        return value

    @model_validator(mode="after")
    def _prompts_are_given_once(self) -> Self:
        if self.data is not None and self.sets:
            raise ValueError(
                f"data and sets ({', '.join(self.sets)}) both have held-out prompts: make data one "
                "of the sets, eval.sets.NAME.data, or set eval.sets={}"
            )
        return self

    @model_serializer(mode="wrap")
    def _sets_describe_themselves(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the sets' defaults: each set has them, and `with_defaults` refuses idle
        ones."""
        table: dict[str, Any] = write(self)
        return {key: table[key] for key in NOT_OF_A_SET if key in table} if self.sets else table

    @property
    def named_sets(self) -> Mapping[str, EvalSet]:
        """Held-out sets by name; `eval.data` alone is a set with the name ""."""
        return self.sets if self.data is None else {"": self}


def section_of(name: str) -> str:
    """Section of the config that describes the set `name`: `eval.sets.NAME`, or `eval`."""
    return f"eval.sets.{name}" if name else "eval"


def metric_prefix(name: str) -> str:
    return f"eval/{name}/" if name else "eval/"


def _inherited(run: Mapping[str, Any]) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Names of the tables that held-out sets inherit, and the run with these tables."""
    # All of `data` except shuffle, which they refuse.
    if isinstance(data := run.get("data"), dict):
        run = {**run, "data": {**data, "shuffle": False}}
    return ("data", "reward"), run


def without_defaults(
    evaluation: dict[str, Any], run: Mapping[str, Any], keys: Iterable[str] = ()
) -> dict[str, Any]:
    """Undo `with_defaults`. Of the keys that it has moved into sets, only `keys` of `evaluation`,
    such as `k` or `reward.functions`, leave them: those with the same value in all sets."""
    names, run = _inherited(run)
    evaluation = without_inherited(evaluation, names, run)
    if not (sets := evaluation.get("sets")):
        return evaluation
    sets = {name: without_inherited(held_out, names, run) for name, held_out in sets.items()}
    for key in keys:
        *table, last = key.split(".")
        holders = [reduce(_below, table, one) for one in sets.values()]
        if all(last in each and each[last] == holders[0][last] for each in holders):
            for each in holders:
                del each[last]
    return {**evaluation, "sets": sets}


def _below(table: dict[str, Any], key: str) -> dict[str, Any]:
    """The table at `key`; empty if there is none."""
    value = table.get(key)
    return value if isinstance(value, dict) else {}


def with_defaults(evaluation: dict[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the table `evaluation` with defaults.

    `eval.data` and `eval.reward` take theirs from `data` and `reward` of `run`. With `eval.sets`,
    the other keys of `evaluation` move into each set that lacks them, and null sets are left out:
    `{k: [1], sets: {a: {data: A}, b: null}}` becomes `{sets: {a: {k: [1], data: A}}}`.

    Raises ValueError for a key that every set has itself. A saved config has all keys in each set,
    so an override such as `eval.temperature=0` would otherwise do nothing, silently.
    """
    names, run = _inherited(run)
    own, sets = completed(evaluation, names, run), evaluation.get("sets")
    if not isinstance(sets, dict):
        return own
    sets = {str(name): held_out for name, held_out in sets.items() if held_out is not None}
    if not sets:
        return {**own, "sets": sets}
    keys_of_sets = [_keys(one) if isinstance(one, dict) else [] for one in sets.values()]
    if idle := [key for key in _keys(evaluation) if all(key in keys for keys in keys_of_sets)]:
        raise ValueError(
            "\n".join(
                f"eval.{key} does nothing, as each of eval.sets ({', '.join(sets)}) has its own: "
                f"use eval.sets.NAME.{key}, or leave it out"
                for key in idle
            )
        )
    shared = {
        key: value for key, value in own.items() if key not in NOT_OF_A_SET and value is not None
    }
    resolved = {
        name: {**shared, **completed(held_out, ("data", "reward"), {**run, **shared})}
        if isinstance(held_out, dict)
        else held_out
        for name, held_out in sets.items()
    }
    return {key: own[key] for key in NOT_OF_A_SET if key in own} | {"sets": resolved}


def _keys(table: Mapping[str, Any]) -> list[str]:
    """Keys of a set, with the keys of `reward` (all of them if it is null) as `reward.KEY`."""
    reward = table.get("reward", {})
    parts = reward if isinstance(reward, dict) else RewardConfig.model_fields
    others = [key for key in table if key not in (*NOT_OF_A_SET, "reward")]
    return [*others, *(f"reward.{part}" for part in parts)]
