"""Rewards of the model: the keys of `reward` and of `environment`."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from megatron_grpo.config.agent import AGENT
from megatron_grpo.config.section import Mistake, Section

ENVIRONMENT = "environment"
"""`Config.partner` of a run with environments, and the label of their reward; no reward function
may have this label."""

RIGHT = ("exact", "math_answer", "unit_tests")
"""Built-in functions that score right answers 1 and all others 0."""
SHAPING = frozenset({"cosine", "repetition", "reward_model", "soft_overlong"})
"""Built-in functions that do not judge whether an answer is right, and must not decide whether it
passes an evaluation."""
REWARD_MODEL = "reward_model"
BUILT_IN = frozenset({*RIGHT, *SHAPING, "format", "judge"})


class RewardFunction(Section):
    """One term of the reward."""

    name: str
    """`exact`, `math_answer`, `format`, `cosine`, `repetition`, `soft_overlong`, `judge`,
    `reward_model`, `unit_tests`, or `file.py:function`."""
    weight: float = 1.0
    """Weight of this function in the total reward."""
    arguments: dict[str, Any] = Field(default={})
    """Keyword arguments of the function, such as `pattern` of `format`."""

    @property
    def label(self) -> str:
        """Name for metrics and messages: the function's name without its file."""
        return self.name.rpartition(":")[2]

    @property
    def is_served_here(self) -> bool:
        """Whether the function is a reward model that the run serves itself."""
        return self.name == REWARD_MODEL and "path" in self.arguments

    @property
    def num_gpus(self) -> int:
        """GPUs of a reward model that the run serves itself; 0 for other functions."""
        return int(self.arguments.get("tensor_parallel_size", 1)) if self.is_served_here else 0

    @property
    def shares_gpus(self) -> bool:
        """Whether the run serves this model on the ranks' GPUs, where it sleeps unless it
        scores."""
        return self.is_served_here and bool(self.arguments.get("share_gpus"))

    @property
    def scores_steps(self) -> bool:
        """Whether the function is a process reward model."""
        return self.name == REWARD_MODEL and self.arguments.get("step_tag") is not None


class RewardConfig(Section):
    """How completions are scored."""

    functions: tuple[RewardFunction, ...] = Field(default=(), strict=False)
    """Reward functions: each a name, or a table with name, weight and arguments."""
    clip_range: tuple[float, float] | None = Field(default=None, strict=False)
    """Bounds that the total reward is clipped to, such as [-10, 10]; null: no clipping. To scale a
    function, set its weight."""
    timeout: PositiveFloat = 60.0
    """Seconds within which a function must score all completions of a prompt."""
    max_failed_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of the completions of a generation or evaluation whose scoring may fail. They are
    masked; more failures stop the run."""
    max_concurrent_calls: PositiveInt = 64
    """Maximum concurrent calls of asynchronous functions; one call scores one prompt."""
    num_workers: PositiveInt = 2
    """Processes that score in parallel."""
    memory_megabytes: PositiveInt = 4096
    """Maximum private memory (RLIMIT_DATA) of each scoring process, and of each process it
    starts."""

    @field_validator("functions", mode="before")
    @classmethod
    def _names_are_functions(cls, value: Any) -> Any:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError("reward.functions is a list: write [exact] or - name: exact")
        return [{"name": item} if isinstance(item, str) else item for item in value]

    @field_validator("clip_range", mode="after")
    @classmethod
    def _bounds_are_ordered(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and value[0] >= value[1]:
            raise ValueError(
                f"reward.clip_range {[*value]} would make all rewards equal: give the lower bound "
                "first, such as [-10, 10]"
            )
        return value

    @property
    def process_model(self) -> RewardFunction | None:
        """The process reward model among the functions, if any."""
        return next((function for function in self.functions if function.scores_steps), None)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for name in (function.name for function in self.functions):
            if ":" not in name and name not in BUILT_IN:
                raise ValueError(
                    f"unknown reward function {name!r}: use {', '.join(sorted(BUILT_IN))}, or "
                    "file.py:function"
                )
        labels = [function.label for function in self.functions]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(
                    f"reward.functions names {label} {labels.count(label)} times, and metrics have "
                    "that name: name it once"
                )
        return self


def served_here(rewards: Iterable[RewardConfig]) -> list[RewardFunction]:
    """Reward models that the run serves itself, without duplicates."""
    found: list[RewardFunction] = []
    for function in (each for reward in rewards for each in reward.functions):
        if function.is_served_here and function.arguments not in [f.arguments for f in found]:
            found.append(function)
    return found


def count_gpus(models: Iterable[RewardFunction], *, shared: bool) -> int:
    """GPUs of the models that share the ranks' GPUs, or with `shared=False` of the others."""
    return sum(model.num_gpus for model in models if model.shares_gpus == shared)


class EnvironmentConfig(Section):
    """The environment: your code, which answers each turn of the model."""

    name: str | None = None
    """`file.py:ClassName`, a class with `reset` and `step`; null: no environment."""
    arguments: dict[str, Any] = Field(default={})
    """Keyword arguments of the class."""
    weight: float = 1.0
    """Weight of the environment's reward, the sum over steps: term `environment` of the total."""
    max_turns: PositiveInt = 8
    """Maximum turns of the model per completion."""
    observation_role: Literal["user", "tool"] = "user"
    """Role of observations in the chat template."""
    timeout: PositiveFloat = 60.0
    """Seconds within which `reset` or `step` must return; otherwise the sample has failed."""
    memory_megabytes: PositiveInt = 4096
    """Maximum private memory (RLIMIT_DATA) of each sample's process and its child processes."""

    @field_validator("name")
    @classmethod
    def _names_a_class(cls, value: str | None) -> str | None:
        if value is not None and not all(value.rpartition(":")):
            raise ValueError(f"environment.name {value!r} is not of the form file.py:ClassName")
        return value


def judge_mistakes(
    terms: Sequence[RewardFunction], threshold: float, section: str
) -> Iterator[Mistake]:
    """Find bonuses or penalties that could decide whether an answer passes."""
    judges = [term for term in terms if term.weight != 0]
    names = [term.name for term in judges]
    # A weight below 1 would keep right answers, which score 1, under the default threshold of 1.
    is_plain = len(judges) == 1 and judges[0].weight >= 1 and SHAPING.isdisjoint(names)
    if judges and not is_plain:
        unshaped = [name for name in names if name not in SHAPING]
        judge = next(iter(sorted(unshaped, key=lambda name: name not in RIGHT)), "math_answer")
        sums = ", ".join(f"{term.name} * {term.weight:g}" for term in judges)
        has_own = not {ENVIRONMENT, AGENT}.isdisjoint(names)
        remedies = [] if has_own else [f"{section}.reward.functions=[{judge}]"]
        yield Mistake(
            f"{section}.pass_threshold {threshold} is for rewards that score right answers alone, "
            f"and completions are scored by {sums}: set "
            + "".join(f"{each}, or " for each in remedies)
            + f"{section}.pass_threshold to the lowest weighted sum that passes",
            *remedies,
        )
