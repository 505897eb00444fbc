"""Loading and calling reward functions: built-in by name, or `file.py:function`."""

import asyncio
import inspect
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from megatron_grpo.config.reward import RewardFunction
from megatron_grpo.workers.user_file import (
    accepted_columns,
    load_named,
    required_parameters,
    select_accepted,
)
from parallel.words import counted

BUILT_IN = {
    "cosine": "builtin",
    "exact": "builtin",
    "format": "builtin",
    "judge": "judge",
    "math_answer": "math",
    "repetition": "builtin",
    "reward_model": "reward_model",
    "soft_overlong": "builtin",
    "unit_tests": "unit_tests",
}
"""Module of this package with each built-in function. Keyword-only parameters of these functions
are arguments of the config, not columns."""

GIVEN_COLUMNS = ("completions", "prompts", "completion_ids", "finish_reasons", "prompt_messages")
"""Columns that the run provides; they win over the data's columns of equal names."""
GIVEN_TIMEOUT = "reward_timeout"
"""Parameter for `reward.timeout`; passed only to a function that names it, never in `**columns`."""

LOAD = -1
"""Number of the answer about loading, in place of a call's number."""
MAX_REASON = 1000
"""Most characters quoted of an exception in place of a score."""


@dataclass(frozen=True)
class StepScores:
    """Scores of a completion's steps; the lowest is the score of the completion."""

    ends: list[int]
    """Index of the character behind each step."""
    scores: list[float]


@dataclass(frozen=True)
class Answer:
    """A worker's answer to a call."""

    scores: list[float] | None
    """One per completion, NaN for a failed score; None if the whole call failed."""
    error: str = ""
    """Reason of the first failed score; empty without one."""
    is_misuse: bool = False
    """Whether the result is not one score per completion: no completion can be masked then."""
    is_out_of_memory: bool = False
    """Whether the process has reached its memory limit and must be replaced."""
    steps: list[list[tuple[int, float]]] | None = None
    """(end, score) of each step of each completion, if the function scores steps."""


class NoScores(ValueError):
    """A function did not return one score per completion: no completion can be masked then."""


@dataclass(frozen=True)
class LoadedFunction:
    """A reward function with the arguments of the config."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    settings: frozenset[str] = frozenset()
    """Parameters that only the config sets, never a column of the data."""

    @property
    def is_async(self) -> bool:
        """Whether the function, or its `__call__` if it is an object, is `async def`."""
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            type(self.function).__call__  # for a plain function, a C slot wrapper
        )

    @property
    def wanted_columns(self) -> list[str]:
        """Parameters without a default that only columns of the data can provide."""
        given = {*GIVEN_COLUMNS, GIVEN_TIMEOUT, *self.arguments}
        return [name for name in required_parameters(self._parameters) if name not in given]

    @property
    def accepted_columns(self) -> list[str] | None:
        """Columns that the function takes if the data has them; None: all."""
        return accepted_columns(self._parameters)

    def __call__(self, columns: Mapping[str, Any], timeout: float) -> Answer:
        """Score `columns["completions"]`; raises NoScores if the result is not a list of one score
        or failure per completion, and whatever the function raises."""
        return _answer(self._call(columns, timeout), len(columns["completions"]))

    async def call_async(self, columns: Mapping[str, Any], timeout: float) -> Answer:
        """`__call__` for an asynchronous function."""
        return _answer(await self._call(columns, timeout), len(columns["completions"]))

    def _call(self, columns: Mapping[str, Any], timeout: float) -> Any:
        # In this order, values of the call and of the config win over equally named columns; a
        # column cannot set what only the config may set (`settings`).
        data = {name: column for name, column in columns.items() if name not in self.settings}
        first = {name: columns[name] for name in GIVEN_COLUMNS if name in columns}
        given = select_accepted({**data, **self.arguments, **first}, self._parameters)
        if GIVEN_TIMEOUT in self._parameters:
            given[GIVEN_TIMEOUT] = timeout
        return self.function(**given)

    @property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters


def load_function(spec: RewardFunction) -> LoadedFunction:
    """Import the function of `spec`; raises ValueError if there is none or if it does not take the
    config's arguments. Built-in functions also check their values."""
    is_own = ":" in spec.name
    if is_own:
        function = load_named(spec.name, "file of reward functions")
    else:
        module = import_module(f"megatron_grpo.rewards.{BUILT_IN[spec.name]}")
        function = getattr(module, spec.name)
    try:
        inspect.signature(function).bind_partial(**spec.arguments)
    except TypeError as error:
        raise ValueError(f"arguments {spec.arguments} of reward {spec.name}: {error}") from None
    return LoadedFunction(function, spec.arguments) if is_own else _built_in(spec, function)


def _built_in(spec: RewardFunction, function: Callable[..., Any]) -> LoadedFunction:
    """Check a built-in function's arguments by a call without completions."""
    parameters = inspect.signature(function).parameters
    settings = frozenset(p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY)
    for name in spec.arguments:
        if name not in settings:
            known = ", ".join(sorted(settings - {GIVEN_TIMEOUT})) or "none"
            raise ValueError(
                f"reward function {spec.name} has no argument {name!r}: it has {known}"
            )
    for name in required_parameters(parameters):
        if name in settings - {GIVEN_TIMEOUT, *spec.arguments}:
            raise ValueError(
                f"reward function {spec.name} requires {name!r}: give it in `arguments`"
            )
    loaded = LoadedFunction(function, spec.arguments, settings)
    nothing: dict[str, list[Any]] = {n: [] for n in (*loaded.wanted_columns, *GIVEN_COLUMNS)}
    try:
        if loaded.is_async:
            asyncio.run(loaded.call_async(nothing, math.inf))
        else:
            loaded(nothing, math.inf)
    except (TypeError, ValueError, re.error) as error:
        raise ValueError(f"arguments {spec.arguments} of reward {spec.name}: {error}") from None
    return loaded


def _answer(scores: Any, num_completions: int) -> Answer:
    if hasattr(scores, "tolist"):  # numpy or torch
        scores = scores.tolist()
    wanted = counted(num_completions, "completion")
    if not isinstance(scores, list | tuple):
        raise NoScores(f"returned {type(scores).__name__} instead of a list, for {wanted}")
    if len(scores) != num_completions:
        raise NoScores(f"returned {counted(len(scores), 'score')} for {wanted}")
    numbers = [_number(score) for score in scores]
    failed = [score for score, number in zip(scores, numbers, strict=True) if math.isnan(number)]
    steps = [
        [*zip(score.ends, score.scores, strict=True)] if isinstance(score, StepScores) else []
        for score in scores
    ]
    reason = _reason(failed[0]) if failed else ""
    return Answer(numbers, reason, steps=steps if any(steps) else None)


def _number(score: Any) -> float:
    """The score as a float; NaN for a failed score."""
    if score is None or isinstance(score, Exception):
        return math.nan
    if isinstance(score, StepScores):
        return min(score.scores) if all(map(math.isfinite, score.scores)) else math.nan
    try:
        if not isinstance(score, str):
            return float(score) if math.isfinite(score) else math.nan
    except OverflowError:  # an integer beyond every float
        return math.nan
    except (TypeError, ValueError, RuntimeError):  # torch, for a tensor with several elements
        pass
    raise NoScores(
        f"returned the score {reprlib.repr(score)}: each must be a number, or None where it failed"
    )


def _reason(failed: Any) -> str:
    if isinstance(failed, Exception):
        return f"returned {type(failed).__name__}: {failed}"[:MAX_REASON]
    return f"returned the score {reprlib.repr(failed)}"
