"""What the model is rewarded for: the keys of `reward` and of `environment`."""

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from megatron_grpo.config.config_section import Section

ENVIRONMENT_TERM = "environment"
"""The label of an environment's reward, beside those of the reward functions."""

RIGHT = ("exact", "math_answer")
"""Built-in functions that give right answers 1 and all others 0."""
SHAPING = frozenset({"cosine", "repetition", "soft_overlong"})
"""Built-in functions that say more of a completion than whether it is right, or nothing of that."""


class RewardFunction(Section):
    """One term of the reward."""

    name: str
    """`exact`, `math_answer`, `format`, `cosine`, `repetition`, `soft_overlong`, `judge`, or
    `file.py:function`."""
    weight: float = 1.0
    """Factor of this function in the total reward."""
    arguments: dict[str, Any] = Field(default={})
    """Passed to the function by keyword, such as the `pattern` of `format`."""

    @property
    def label(self) -> str:
        """Short name for metrics and messages: the function's, without its file."""
        return self.name.rpartition(":")[2]


class RewardConfig(Section):
    """How completions are scored."""

    functions: tuple[RewardFunction, ...] = Field(default=(), strict=False)
    """Reward functions: a name, or a table with name, weight and arguments."""
    timeout: PositiveFloat = 60.0
    """Seconds in which one function must have scored the completions of one prompt."""
    max_failed_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of the completions of a generation, or of an evaluation, that may have a failed score,
    and are masked."""
    max_concurrent_calls: PositiveInt = 64
    """Calls of asynchronous functions, one prompt each, that run at once."""
    num_workers: PositiveInt = 2
    """Processes that score in parallel."""
    memory_megabytes: PositiveInt = 4096
    """Most private memory (RLIMIT_DATA) of each of them, and of each process that they start."""

    @field_validator("functions", mode="before")
    @classmethod
    def _names_are_functions(cls, value: Any) -> Any:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError("reward.functions is a list: write [exact] or - name: exact")
        return [{"name": item} if isinstance(item, str) else item for item in value]

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        labels = [function.label for function in self.functions]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(
                    f"reward.functions names {label} {labels.count(label)} times, and metrics go "
                    "by that name: name it once"
                )
        return self


class EnvironmentConfig(Section):
    """What the model speaks with: code of yours that answers each of its turns."""

    name: str | None = None
    """`file.py:ClassName`, a class with `reset` and `step`; null: a completion is one turn."""
    arguments: dict[str, Any] = Field(default={})
    """Passed to the class by keyword."""
    weight: float = 1.0
    """Factor of its rewards, summed over the steps: the term `environment` of the total reward."""
    max_turns: PositiveInt = 8
    """Most turns of the model in one completion."""
    observation_role: Literal["user", "tool"] = "user"
    """Role of an observation in the chat template."""
    timeout: PositiveFloat = 60.0
    """Seconds in which `reset` or `step` must have answered; else that sample has failed."""
    memory_megabytes: PositiveInt = 4096
    """Most private memory (RLIMIT_DATA) of the process of each sample, and of what it starts."""

    @field_validator("name")
    @classmethod
    def _names_a_class(cls, value: str | None) -> str | None:
        if value is not None and not all(value.rpartition(":")):
            raise ValueError(f"environment.name {value!r} is not of the form file.py:ClassName")
        return value
