"""Loads and calls the user's environment class, and checks what it returns."""

import inspect
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_grpo.user_code.columns import required, taken
from megatron_grpo.user_code.user_file import load_user_file

MAX_CHARACTERS = 1 << 20
"""Most characters of one observation: no model's context holds more."""
TURN = ("token_ids", "finish_reason", "tokens_left")
"""What `step` may ask for besides the text of the turn, by parameters of these names."""
LOAD_KEY = -1
"""Key of the answer about loading the class, in place of an instance's key."""


@dataclass(frozen=True)
class LoadedClass:
    """An environment class with the arguments of the config."""

    make: Callable[..., Any]
    arguments: Mapping[str, Any]

    @classmethod
    def load(cls, name: str, arguments: Mapping[str, Any]) -> "LoadedClass":
        """Import `file.py:ClassName`; raises ValueError if it is not an environment."""
        path, _, class_name = name.rpartition(":")
        found = getattr(load_user_file(Path(path), "file of an environment"), class_name, None)
        if not inspect.isclass(found):
            raise ValueError(f"{path} has no class {class_name!r}")
        for method in ("reset", "step"):
            if not callable(getattr(found, method, None)):
                raise ValueError(f"{name} has no method {method}")
        try:
            inspect.signature(found).bind(**arguments)
        except TypeError as error:
            raise ValueError(
                f"environment.arguments {dict(arguments)} of {name}: {error}"
            ) from None
        besides_text = _parameters(found.step, skip=2)  # type: ignore[attr-defined]
        for parameter in required(besides_text):
            if parameter not in TURN:
                raise ValueError(
                    f"step of {name} requires {parameter!r}: besides the text it may take "
                    f"{', '.join(TURN)}"
                )
        return cls(found, arguments)

    @property
    def wanted_columns(self) -> list[str]:
        """Parameters of `reset` without a default, other than `prompt`."""
        return [name for name in required(self._reset_parameters) if name != "prompt"]

    def reset(self, prompt: str, columns: Mapping[str, Any]) -> tuple[Any, str | None]:
        """A new environment, and its first observation."""
        given = taken({**columns, "prompt": prompt}, self._reset_parameters)
        environment = self.make(**self.arguments)
        observation = environment.reset(**given)
        return environment, None if observation is None else _text("reset", observation)

    @property
    def _reset_parameters(self) -> dict[str, inspect.Parameter]:
        return _parameters(self.make.reset, skip=1)  # type: ignore[attr-defined]


def step(environment: Any, text: str, turn: Mapping[str, Any]) -> tuple[str, float, bool]:
    """Observation, reward and done; raises ValueError for anything else.

    `turn` has the values of `TURN`, of which `step` gets those that it takes.
    """
    answer = environment.step(text, **taken(turn, _parameters(environment.step, skip=1)))
    if not isinstance(answer, tuple | list) or len(answer) != 3:
        raise ValueError(
            f"step returned {reprlib.repr(answer)} instead of (observation, reward, done)"
        )
    observation, reward, done = answer
    return _text("step", observation), _number(reward), _flag(done)


def _parameters(method: Callable[..., Any], *, skip: int) -> dict[str, inspect.Parameter]:
    """The parameters of a method by name, without the first `skip`."""
    return dict(islice(inspect.signature(method).parameters.items(), skip, None))


def _text(method: str, observation: Any) -> str:
    if not isinstance(observation, str):
        raise ValueError(
            f"{method} returned the observation {reprlib.repr(observation)}: not a text"
        )
    if len(observation) > MAX_CHARACTERS:
        raise ValueError(
            f"{method} returned an observation of {len(observation)} characters: "
            f"at most {MAX_CHARACTERS}"
        )
    return observation.encode(errors="replace").decode()  # replaces lone surrogates


def _number(reward: Any) -> float:
    try:
        if not isinstance(reward, str) and math.isfinite(reward):
            return float(reward)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"step returned the reward {reprlib.repr(reward)}: not a finite number")


def _flag(done: Any) -> bool:
    if not isinstance(done, str) and done in (True, False):
        return bool(done)
    raise ValueError(f"step returned done = {reprlib.repr(done)}: neither true nor false")
