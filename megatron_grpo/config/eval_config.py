"""Held-out prompts: the keys of `eval`."""

from typing import Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from megatron_grpo.config.config_section import Section
from megatron_grpo.config.data_config import DataConfig
from megatron_grpo.config.reward_config import RewardConfig
from megatron_grpo.config.rollout_config import LEAST_TEMPERATURE


class EvalConfig(Section):
    """Held-out prompts, and how they are sampled and scored in training and by the command.

    No gradient is taken of these samples, so the distribution may be truncated, or greedy.
    """

    data: DataConfig | None = None
    """Held-out prompts: the keys of `data`, whose values are the defaults; null: no evaluation."""
    reward: RewardConfig | None = None
    """Scoring: the keys of `reward`, whose values are the defaults; null: the same as `reward`."""
    interval: PositiveInt = 10
    """Optimizer steps between evaluations; there is also one before the first and after the last
    step."""
    max_prompts: PositiveInt | None = None
    """Number of prompts to evaluate, the first ones of the data; null: all."""
    num_generations: PositiveInt = 1
    """Completions per prompt: the n of pass@k and mean@n."""
    k: tuple[PositiveInt, ...] = Field(
        strict=False, default_factory=lambda data: tuple(sorted({1, data["num_generations"]}))
    )
    """Values of k in pass@k, each at most num_generations; default: 1 and num_generations."""
    pass_threshold: float = 1.0
    """A completion passes when its weighted sum of rewards is at least this; required with several
    functions, or with one that shapes or has a weight below 1."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature, 0 (greedy) or at least 0.01; null: rollout.temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the likeliest tokens that make up this probability, above 0; 1: from all
    tokens."""
    top_k: int = -1
    """Sample from this many likeliest tokens, at least 1; -1: from all tokens."""
    max_completion_length: PositiveInt | None = None
    """Maximum tokens per completion, including the end token; null:
    rollout.max_completion_length."""

    @model_validator(mode="after")
    def _k_can_be_drawn(self) -> Self:
        if too_many := [k for k in self.k if k > self.num_generations]:
            raise ValueError(
                f"eval.k {too_many[0]} is above eval.num_generations "
                f"{self.num_generations}: raise that to {max(too_many)}, or lower k"
            )
        return self

    @model_validator(mode="after")
    def _can_be_sampled(self) -> Self:
        if self.temperature == 0 and self.num_generations > 1:
            raise ValueError(
                f"eval.temperature 0 makes eval.num_generations {self.num_generations} identical "
                "completions of a prompt: use eval.num_generations 1, or a temperature above 0"
            )
        if self.temperature is not None and 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"eval.temperature {self.temperature} would be raised to {LEAST_TEMPERATURE}: use "
                f"0, or at least {LEAST_TEMPERATURE}"
            )
        if self.top_k < 1 and self.top_k != -1:
            raise ValueError(f"eval.top_k {self.top_k}: use -1 for all tokens, or at least 1")
        return self

    @field_validator("data", mode="after")
    @classmethod
    def _rows_keep_their_order(cls, value: DataConfig | None) -> DataConfig | None:
        if value is not None and value.shuffle:
            raise ValueError(
                "eval.data.shuffle true: prompts of an evaluation keep the order of their rows; "
                "leave it out"
            )
        return value
