"""The configuration of a run: its sections, and values derived from several of them.

Each section has its own file, which defines the type, default and meaning of every key and checks
the section by itself; `checks.py` checks them together. Nothing imports torch, so mistakes are
reported at once.
"""

from math import ceil
from typing import Any

from pydantic import model_validator

from checkpoint_convert.quantized.scheme import Quantization
from megatron_grpo.config.agent import AGENT, AgentConfig
from megatron_grpo.config.data import DataConfig
from megatron_grpo.config.eval import EvalConfig, section_of, with_defaults
from megatron_grpo.config.grpo import GRPOConfig
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.config.megatron_fields import token_multiple
from megatron_grpo.config.offload import Offload
from megatron_grpo.config.optimizer import OptimizerConfig
from megatron_grpo.config.reward import (
    ENVIRONMENT,
    EnvironmentConfig,
    RewardConfig,
    RewardFunction,
)
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.section import Section
from megatron_grpo.config.sources import ALONE, SourcesConfig, with_sources
from megatron_grpo.config.trackers import SwanlabConfig, TrackioConfig, WandbConfig
from megatron_grpo.config.train import ModelConfig, ParallelConfig, TrainConfig
from parallel import ParallelDims
from parallel.alignment import Alignment


class Config(Section):
    """One run. Defaults suit a first run; fields without a default must be given."""

    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig = ParallelConfig()
    grpo: GRPOConfig
    rollout: RolloutConfig
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    agent: AgentConfig = AgentConfig()
    sources: SourcesConfig = SourcesConfig()
    eval: EvalConfig = EvalConfig()
    wandb: WandbConfig = WandbConfig()
    trackio: TrackioConfig = TrackioConfig()
    swanlab: SwanlabConfig = SwanlabConfig()

    @model_validator(mode="before")
    @classmethod
    def _others_follow(cls, table: Any) -> Any:
        if not isinstance(table, dict):
            return table
        table = with_sources(table)
        if isinstance(table.get("eval"), dict):
            table = {**table, "eval": with_defaults(table["eval"], table)}
        return table

    @property
    def rewards(self) -> dict[str, RewardConfig]:
        """Scoring of training, and of held-out sets with their own, by section of the config."""
        own = {f"{section_of(n)}.reward": s.reward for n, s in self.eval.named_sets.items()}
        key = "sources.by_name.{}.reward" if self.sources.by_name else "reward"
        trained = {key.format(name): view.reward for name, view in self.by_source.items()}
        return trained | {name: each for name, each in own.items() if each}

    @property
    def by_source(self) -> dict[str, "Config"]:
        """Config of each source's rows, by its name; without sources, the run's own."""
        if not self.sources.by_name:
            return {ALONE: self}
        # Without sources, so that the view of a source is its own only view.
        return {
            name: self.model_copy(update={**source.own, "sources": SourcesConfig()})
            for name, source in self.sources.by_name.items()
        }

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps; with `train.num_epochs` only after `with_num_steps`."""
        assert self.train.num_steps is not None, "the data is not read yet"
        return self.train.num_steps

    @property
    def num_engines(self) -> int:
        """Number of engines in use; a replay has none."""
        return 0 if self.train.replay is not None else self.rollout.num_engines

    @property
    def trained_quantization(self) -> Quantization:
        """Format of the weights in all passes of the ranks: the engines' or, if theirs are not
        quantised, the export's. `none` without `rollout.quantization_aware`."""
        if not self.rollout.quantization_aware:
            return "none"
        engines = self.rollout.quantization
        return self.train.export_quantization if engines == "none" else engines

    @property
    def completions_per_engine(self) -> int:
        """Completions that an engine may have at once, of all generations in progress."""
        rollout, ahead = self.rollout, max(1, self.rollout.max_staleness)
        generations = rollout.over_sampling if rollout.over_sampling > 1 else ahead
        return ceil(self.grpo.generation_batch_size * generations / rollout.num_engines)

    @property
    def offload(self) -> Offload:
        """`train.offload`, or `none` without engines."""
        return self.train.offload if self.num_engines else "none"

    @property
    def trackers(self) -> list[str]:
        """Packages that receive the run's metrics."""
        used = {
            "tensorboard": self.train.tensorboard,
            "wandb": self.wandb.project,
            "trackio": self.trackio.project,
            "swanlab": self.swanlab.project,
        }
        return [package for package, is_used in used.items() if is_used]

    @property
    def reward_terms(self) -> tuple[RewardFunction, ...]:
        """Terms of the total reward: the functions, and the partner's own reward."""
        return self.terms_of(self.reward)

    @property
    def reward_labels(self) -> list[str]:
        """Labels of the terms of all sources, each once, in the order of the config."""
        terms = (term for view in self.by_source.values() for term in view.reward_terms)
        return [*dict.fromkeys(term.label for term in terms)]

    @property
    def has_dialogues(self) -> bool:
        """Whether an environment or an agent answers any row."""
        return any(view.partner for view in self.by_source.values())

    @property
    def partner(self) -> str:
        """Partner of the model in sessions, `agent` or `environment`, which is also the label of
        the partner's reward; empty without one."""
        if self.agent.is_used:
            return AGENT
        return "" if self.environment.name is None else ENVIRONMENT

    def terms_of(self, reward: RewardConfig) -> tuple[RewardFunction, ...]:
        """Terms of a total reward: its functions, and the partner's own reward."""
        if not self.partner:
            return reward.functions
        weight = self.agent.weight if self.partner == AGENT else self.environment.weight
        return (*reward.functions, RewardFunction(name=self.partner, weight=weight))

    @property
    def mixes_in_float32(self) -> bool:
        """Whether the reference has a float32 copy: `model.dtype` would round small updates
        away."""
        is_mixed = self.grpo.sync_ref_model and self.grpo.ref_model_mixup_alpha < 1
        return is_mixed and self.model.dtype != "float32"

    @property
    def dims(self) -> ParallelDims:
        """The trainer's mesh; raises ValueError when the sizes are incompatible."""
        return self.parallel.dims

    @property
    def alignment(self) -> Alignment:
        """Multiples that the lengths of packed sequences and microbatches are padded to."""
        multiple = token_multiple(self.model.megatron)
        return Alignment.for_mesh(self.dims, self.parallel.sequence_parallel, multiple)
