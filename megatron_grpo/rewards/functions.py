"""Finding and calling reward functions: built-in by name, or `file.py:function`."""

import inspect
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_grpo.config import RewardFunction
from megatron_grpo.user_file import load_user_file

# Each is a module of this package with a function of the same name.
BUILT_IN = ("exact", "format", "math_answer")


@dataclass(frozen=True)
class LoadedFunction:
    """A reward function with the arguments of the config."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]

    @property
    def wanted_columns(self) -> list[str]:
        """Parameters without a default that neither the call nor the config fills."""
        given = {"completions", "prompts", *self.arguments}
        return [
            name
            for name, parameter in inspect.signature(self.function).parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            and name not in given
        ]

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], columns: Mapping[str, Any]
    ) -> list[float]:
        """One finite float per completion; raises ValueError for anything else."""
        # What the call and the config give goes before a column of the same name.
        given = {**columns, **self.arguments, "completions": completions, "prompts": prompts}
        parameters = inspect.signature(self.function).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            given = {name: value for name, value in given.items() if name in parameters}
        return _checked(self.function(**given), len(completions))


def load_function(spec: RewardFunction) -> LoadedFunction:
    """Import the function that a config names; raises ValueError when there is none."""
    path, colon, name = spec.name.rpartition(":")
    if not colon and name not in BUILT_IN:
        raise ValueError(
            f"unknown reward function {name!r}: give {', '.join(BUILT_IN)}, or file.py:function"
        )
    module = (
        load_user_file(Path(path), "file of reward functions")
        if colon
        else import_module(f"megatron_grpo.rewards.{name}")
    )
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{path} has no function {name!r}")
    loaded = LoadedFunction(getattr(module, name), spec.arguments)
    _check_arguments(spec, loaded.function)
    return loaded


def _check_arguments(spec: RewardFunction, function: Callable[..., Any]) -> None:
    try:
        inspect.signature(function).bind_partial(**spec.arguments)
    except TypeError as error:
        raise ValueError(f"arguments {spec.arguments} of reward {spec.name}: {error}") from None


def _checked(scores: Any, num_completions: int) -> list[float]:
    if hasattr(scores, "tolist"):  # of numpy or torch
        scores = scores.tolist()
    if not isinstance(scores, list | tuple):
        raise ValueError(
            f"returned {type(scores).__name__} and not a list, for {num_completions} completions"
        )
    if len(scores) != num_completions:
        raise ValueError(f"returned {len(scores)} scores for {num_completions} completions")
    return [_number(score) for score in scores]


def _number(score: Any) -> float:
    try:
        if not isinstance(score, str) and math.isfinite(score):
            return float(score)
    except (TypeError, ValueError, RuntimeError):  # torch, of a tensor of several elements
        pass
    raise ValueError(f"returned the score {reprlib.repr(score)}: each must be a finite number")
