"""The configuration of a run: its sections, and what they must have of one another.

A section is in a file of its own, every key with its type, default and meaning. Checked in here is
what the config alone can judge; `preflight.py` asks the model, the engines and, by
`prompt_checks.py`, the data. Nothing here imports torch, so that a mistake is told at once.
`config_file.py` reads and writes configs as YAML.
"""

from typing import Any, Self

from pydantic import NonNegativeInt, model_validator

from megatron_grpo.config.config_section import Section
from megatron_grpo.config.data_config import DataConfig
from megatron_grpo.config.eval_config import EvalConfig
from megatron_grpo.config.grpo_config import GRPOConfig
from megatron_grpo.config.reward_config import (
    ENVIRONMENT_TERM,
    RIGHT,
    SHAPING,
    EnvironmentConfig,
    RewardConfig,
    RewardFunction,
)
from megatron_grpo.config.rollout_config import RolloutConfig
from megatron_grpo.config.trainer_config import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from parallel import ParallelDims


class WandbConfig(Section):
    """Logging to Weights & Biases: offline without WANDB_API_KEY, unless WANDB_MODE is set."""

    project: str | None = None
    """Project to log to; null: wandb is off."""
    name: str | None = None
    """Name of the run; null: wandb invents one."""
    num_completions: NonNegativeInt = 16
    """Most completions of each step in wandb's table; `completions.jsonl` has all of them."""


class Config(Section):
    """One run. Fields have the default that a first run wants; those without one must be given."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig = ParallelConfig()
    grpo: GRPOConfig
    rollout: RolloutConfig
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    eval: EvalConfig = EvalConfig()
    wandb: WandbConfig = WandbConfig()

    @model_validator(mode="before")
    @classmethod
    def _eval_follows(cls, table: Any) -> Any:
        """What `eval.data` and `eval.reward` leave out is as in `data` and `reward`."""
        if not isinstance(table, dict) or not isinstance(table.get("eval"), dict):
            return table
        evaluation = dict(table["eval"])
        for name, own in (("data", {"shuffle": False}), ("reward", {})):
            given, followed = evaluation.get(name), table.get(name)
            if isinstance(given, dict) and isinstance(followed, dict):
                evaluation[name] = {**followed, **own, **given}
        return {**table, "eval": evaluation}

    @model_validator(mode="after")
    def _warmup_ends(self) -> Self:
        warmup, steps = self.optimizer.lr_warmup_steps, self.train.num_steps
        if warmup >= steps:
            raise ValueError(
                f"optimizer.lr_warmup_steps {warmup} leaves none of the {steps} train.num_steps: "
                f"use at most {steps - 1}"
            )
        return self

    @model_validator(mode="after")
    def _shared_prompts_have_attention(self) -> Self:
        """They are computed by our own attention, which is plain."""
        refused = {"window_size", "softmax_type"}
        for name in sorted(
            refused & self.model.megatron.keys() if self.grpo.shared_prompts else ()
        ):
            raise ValueError(
                f"model.megatron.{name} is not known to the attention of grpo.shared_prompts=true: "
                "leave out one of the two"
            )
        return self

    @model_validator(mode="after")
    def _staleness_is_corrected(self) -> Self:
        mode, old = self.grpo.rollout_importance_sampling_mode, self.grpo.old_logprobs
        if self.rollout.async_generate and old != "rollout" and mode is None:
            raise ValueError(
                "rollout.async_generate true trains on samples of older weights, and "
                f"grpo.old_logprobs {old} with grpo.rollout_importance_sampling_mode null takes "
                "them for samples of the present ones: use grpo.old_logprobs=rollout, or a mode "
                "such as token_truncate"
            )
        return self

    @model_validator(mode="after")
    def _environment_fits(self) -> Self:
        if self.grpo.supervision == "process" and self.environment.name is None:
            raise ValueError(
                "grpo.supervision process compares the rewards of steps, which an environment "
                "gives: name one in environment.name, or use outcome"
            )
        if self.eval.data is not None and self.environment.name is not None:
            raise ValueError(
                "eval.data: an evaluation has completions of one turn, and environment.name "
                f"{self.environment.name} makes dialogues: leave out one of the two"
            )
        return self

    @model_validator(mode="after")
    def _something_is_evaluated(self) -> Self:
        idle = [name for name, value in self.eval if value != getattr(EvalConfig(), name)]
        if self.eval.data is None and idle:
            raise ValueError(
                f"eval.{idle[0]} does nothing without eval.data: name held-out prompts, such as "
                "eval.data.path=FILE or eval.data.split=test, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _something_judges(self) -> Self:
        if self.eval.reward is not None and not self.eval.reward.functions:
            raise ValueError("eval.reward.functions is empty: name at least 1, such as [exact]")
        return self

    @model_validator(mode="after")
    def _right_answers_pass(self) -> Self:
        """What is added to or taken from a right answer must not decide whether it passes."""
        if self.eval.data is None or "pass_threshold" in self.eval.model_fields_set:
            return self
        judges = [each for each in (self.eval.reward or self.reward).functions if each.weight != 0]
        names = [function.name for function in judges]
        is_plain = len(judges) == 1 and judges[0].weight >= 1 and SHAPING.isdisjoint(names)
        if judges and not is_plain:
            unshaped = [name for name in names if name not in SHAPING]
            judge = next(iter(sorted(unshaped, key=lambda name: name not in RIGHT)), "math_answer")
            sums = ", ".join(f"{function.name} * {function.weight:g}" for function in judges)
            raise ValueError(
                f"eval.pass_threshold {self.eval.pass_threshold} is for a reward of right answers "
                f"alone, and completions are judged by {sums}: set "
                f"eval.reward.functions=[{judge}], or eval.pass_threshold to the least weighted "
                "sum that passes"
            )
        return self

    @model_validator(mode="after")
    def _something_rewards(self) -> Self:
        labels = [function.label for function in self.reward.functions]
        if self.environment.name is None and not labels:
            raise ValueError(
                "reward.functions is empty: name at least 1, such as [exact], or an environment"
            )
        if self.environment.name is not None and ENVIRONMENT_TERM in labels:
            raise ValueError(
                f"reward.functions names {ENVIRONMENT_TERM}, and so is the reward of the "
                "environment called: rename the function"
            )
        return self

    @property
    def reward_terms(self) -> tuple[RewardFunction, ...]:
        """What the total reward is the weighted sum of: the functions, and the environment."""
        if self.environment.name is None:
            return self.reward.functions
        environment = RewardFunction(name=ENVIRONMENT_TERM, weight=self.environment.weight)
        return (*self.reward.functions, environment)

    @property
    def mixes_in_float32(self) -> bool:
        """Whether the reference has float32 weights beside its own, which would round them."""
        is_mixed = self.grpo.sync_ref_model and self.grpo.ref_model_mixup_alpha < 1
        return is_mixed and self.model.dtype != "float32"

    @property
    def dims(self) -> ParallelDims:
        """The trainer's mesh; raises ValueError when the sizes cannot stand together."""
        return self.parallel.dims
