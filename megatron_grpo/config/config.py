"""The configuration of a run: its sections, and the checks that span several of them.

Each section has its own file, which defines the type, default and meaning of every key. The checks
here need the config alone; `preflight.py` also checks it against the model and the engines, and
`prompt_checks.py` against the data. Nothing here imports torch, so mistakes are reported at once.
"""

from typing import Any, Self

from pydantic import ValidationError, model_validator

from megatron_grpo.config.agent import AGENT, AgentConfig, check_agent
from megatron_grpo.config.data import DataConfig
from megatron_grpo.config.eval import EvalConfig, section_of, with_defaults
from megatron_grpo.config.grpo import GRPOConfig
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.config.megatron_fields import token_multiple
from megatron_grpo.config.offload import Offload, check_offload, parts_moved
from megatron_grpo.config.optimizer import OptimizerConfig
from megatron_grpo.config.reward import (
    ENVIRONMENT,
    EnvironmentConfig,
    RewardConfig,
    RewardFunction,
    check_judges,
)
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.section import Section, as_yaml, refuse_beside
from megatron_grpo.config.sources import ALONE, SourcesConfig, check_views, with_sources
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

    @model_validator(mode="after")
    def _check_training(self) -> Self:
        self.parallel.check_dispatch(self.model.megatron)
        self.parallel.check_context(self.grpo.shared_prompts, self.model.megatron)
        if self.train.num_steps is not None:  # else checked when known: see `with_num_steps`
            self.optimizer.check_schedule(self.train.num_steps)
        # Megatron-Core's optimizer for the host would not update float32 weights on the GPU.
        keys = "grad_reduce_in_fp32", "use_precision_aware_optimizer", "optimizer_cpu_offload"
        for key, value in zip(keys, (False, True, True), strict=True):
            if self.model.dtype == "float32" and getattr(self.optimizer, key) == value:
                raise ValueError(
                    f"optimizer.{key} {as_yaml(value)} is for bfloat16 weights, and "
                    "model.dtype is float32: leave it out"
                )
        if self.train.num_epochs is not None and not isinstance(self.data.path, str):
            raise ValueError(
                f"train.num_epochs {self.train.num_epochs}: the sets of data.path are passed over "
                "at different times, as their weights say: set train.num_epochs=null and give "
                "train.num_steps"
            )
        if self.train.replay is not None and self.eval.named_sets:
            raise ValueError(
                f"train.replay {self.train.replay} starts no engines, which evaluations need: set "
                "eval.data=null and eval.sets={}"
            )
        return self

    @model_validator(mode="after")
    def _check_rollouts(self) -> Self:
        mode, old = self.grpo.rollout_importance_sampling_mode, self.grpo.old_logprobs
        if (staleness := self.rollout.max_staleness) and old != "rollout" and mode is None:
            raise ValueError(
                f"rollout.max_staleness {staleness} trains on samples of older weights, and "
                f"grpo.old_logprobs {old} with grpo.rollout_importance_sampling_mode null treats "
                "them as samples of the current ones: use grpo.old_logprobs=rollout, or a mode "
                "such as token_truncate"
            )
        if self.rollout.over_sampling > 1 and self.partner:
            raise ValueError(
                f"rollout.over_sampling {self.rollout.over_sampling} has completions in progress "
                "in every checkpoint, and dialogues with an environment or an agent cannot be "
                "saved before they end: set rollout.over_sampling=1"
            )
        check_agent(self)
        check_offload(self)
        if self.rollout.router_replay and self.model.megatron.get("moe_router_fusion"):
            raise ValueError(
                "model.megatron.moe_router_fusion true chooses experts in a kernel of its own, "
                "which rollout.router_replay true cannot tell what to choose: leave out one of "
                "the two"
            )
        return self

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        if not self.lora.r:
            return self
        megatron = self.model.megatron
        others = {  # what does not know a model of which most weights are frozen
            "optimizer.optimizer muon": self.optimizer.optimizer == "muon",
            "train.offload": parts_moved(self.train.offload),
            "train.export_quantization": self.train.export_quantization != "none",
            "train.init_from": self.train.init_from,
            "parallel.overlap_param_gather": self.parallel.overlap_param_gather,
            "model.megatron.moe_shared_expert_overlap": megatron.get("moe_shared_expert_overlap"),
            "model.megatron.fp8": megatron.get("fp8"),
        }
        refuse_beside("adapters", others, "leave it out, or set lora.r=0")
        if not self.lora.is_served or self.train.replay is not None:
            return self
        instead = "set lora.sync=merged"
        if self.rollout.engine != "vllm" or self.rollout.weight_transport == "disk":
            raise ValueError(
                "lora.sync adapter needs engines into whose adapters weights can be pushed: use "
                f"rollout.engine=vllm without rollout.weight_transport=disk, or {instead}"
            )
        if self.rollout.vllm.get("load_format") == "dummy":
            raise ValueError(
                "rollout.vllm.load_format dummy makes engines start with random weights, and "
                f"lora.sync adapter pushes no others: leave it out, or {instead}"
            )
        return self

    @model_validator(mode="after")
    def _check_quantization(self) -> Self:
        name, exported = self.rollout.quantization, self.train.export_quantization
        if self.rollout.quantization_ignore and name == exported == "none":
            raise ValueError(
                "rollout.quantization_ignore does nothing without rollout.quantization or "
                "train.export_quantization: leave it out"
            )
        if self.model.megatron.get("fp8"):
            aware = {"rollout.quantization_aware true": self.rollout.quantization_aware}
            refuse_beside("model.megatron.fp8", aware)
        if name == "none" or self.train.replay is not None:
            return self
        if self.model.dtype != "bfloat16":
            raise ValueError(
                f"rollout.quantization {name} is for bfloat16 weights, and model.dtype is "
                f"{self.model.dtype}: set model.dtype=bfloat16, or leave it out"
            )
        if self.lora.is_served:
            raise ValueError(
                f"lora.sync adapter leaves the weights to engines, and rollout.quantization {name} "
                "needs the ranks to push them: set lora.sync=merged, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_rewards(self) -> Self:
        has_steps = self.environment.name is not None or self.reward.process_model is not None
        if self.grpo.supervision == "process" and not has_steps:
            raise ValueError(
                "grpo.supervision process compares the rewards of steps: name an environment in "
                "environment.name, or a reward_model with step_tag, or use outcome"
            )
        if self.reward.clip_range is not None and self.grpo.by_parts:
            raise ValueError(
                f"reward.clip_range clips the total reward, and grpo.{self.grpo.by_parts} compares "
                "its parts: set reward.clip_range=null"
            )
        if self.sources.by_name:  # the rest is checked for each
            return self
        for section, reward in self.rewards.items():
            labels = [function.label for function in reward.functions]
            if not any(term.weight for term in self.terms_of(reward)) and not labels:
                raise ValueError(
                    f"{section}.functions is empty: name at least 1, such as [exact], or an "
                    "environment"
                )
            if self.partner in labels:
                raise ValueError(
                    f"{section}.functions names {self.partner}, the name of the "
                    f"{self.partner}'s own reward: rename the function"
                )
        name, known = self.grpo.dynamic_sample_reward, [term.label for term in self.reward_terms]
        if name is not None and name not in known:
            raise ValueError(
                f"grpo.dynamic_sample_reward {name}: the reward has no such term, use "
                f"{', '.join(known)}, or null for their weighted sum"
            )
        return self

    @model_validator(mode="after")
    def _check_evaluations(self) -> Self:
        idle = [name for name, value in self.eval if value != getattr(EvalConfig(), name)]
        if not self.eval.named_sets and idle:
            raise ValueError(
                f"eval.{idle[0]} does nothing without eval.data or eval.sets: name held-out "
                "prompts, such as eval.data.path=FILE or eval.data.split=test, or leave it out"
            )
        for name, held_out in self.eval.named_sets.items():
            reward, section = held_out.reward or self.reward, section_of(name)
            if "pass_threshold" not in held_out.model_fields_set:
                check_judges(self.terms_of(reward), held_out.pass_threshold, section)
            bounds = reward.clip_range
            if bounds is not None and held_out.pass_threshold > bounds[1]:
                raise ValueError(
                    f"{section}.pass_threshold {held_out.pass_threshold} is above all rewards, "
                    f"which are clipped to {[*bounds]}: lower it, or set "
                    f"{section}.reward.clip_range=null"
                )
        return self

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if not self.sources.by_name:
            return self
        if self.grpo.by_parts:
            raise ValueError(
                f"grpo.{self.grpo.by_parts} compares parts of the reward, and each of "
                "sources.by_name has its own: leave out one of the two"
            )
        for name, view in self.by_source.items():
            try:  # what is legal for a run by itself is legal for a source
                self.model_validate(dict(view))
            except ValidationError as error:
                told = error.errors()[0]["ctx"]["error"]
                raise ValueError(f"sources.by_name.{name}: {told}") from None
        check_views(self, self.by_source)
        return self

    @property
    def rewards(self) -> dict[str, RewardConfig]:
        """How training and held-out sets with their own reward are scored, by section."""
        own = {f"{section_of(n)}.reward": s.reward for n, s in self.eval.named_sets.items()}
        key = "sources.by_name.{}.reward" if self.sources.by_name else "reward"
        trained = {key.format(name): view.reward for name, view in self.by_source.items()}
        return trained | {name: each for name, each in own.items() if each}

    @property
    def by_source(self) -> dict[str, "Config"]:
        """The run as it is for the rows of each source, by name; of a run without, itself."""
        if not self.sources.by_name:
            return {ALONE: self}
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
        """Number of engines that the run works with; a replay has none."""
        return 0 if self.train.replay is not None else self.rollout.num_engines

    @property
    def offload(self) -> Offload:
        """State that makes room for engines: `train.offload`, or `none` without engines."""
        return self.train.offload if self.num_engines else "none"

    @property
    def trackers(self) -> list[str]:
        """Packages that the run sends its metrics to."""
        used = {
            "tensorboard": self.train.tensorboard,
            "wandb": self.wandb.project,
            "trackio": self.trackio.project,
            "swanlab": self.swanlab.project,
        }
        return [package for package, is_used in used.items() if is_used]

    @property
    def reward_terms(self) -> tuple[RewardFunction, ...]:
        """The terms of the total reward, a weighted sum: the functions, and the dialogue's own."""
        return self.terms_of(self.reward)

    @property
    def reward_labels(self) -> list[str]:
        """Labels of the terms of all sources, each once, in the order of the config."""
        terms = (term for view in self.by_source.values() for term in view.reward_terms)
        return [*dict.fromkeys(term.label for term in terms)]

    @property
    def has_dialogues(self) -> bool:
        """Whether any row is answered by an environment or an agent."""
        return any(view.partner for view in self.by_source.values())

    @property
    def partner(self) -> str:
        """The model's partner in sessions, `agent` or `environment`, which is also the label of the
        reward that it gives; empty without one."""
        if self.agent.is_used:
            return AGENT
        return "" if self.environment.name is None else ENVIRONMENT

    def terms_of(self, reward: RewardConfig) -> tuple[RewardFunction, ...]:
        """The terms of a total reward: the functions, and the dialogue's own."""
        if not self.partner:
            return reward.functions
        weight = self.agent.weight if self.partner == AGENT else self.environment.weight
        return (*reward.functions, RewardFunction(name=self.partner, weight=weight))

    @property
    def mixes_in_float32(self) -> bool:
        """Whether the reference also has float32 weights, which `model.dtype` would round."""
        is_mixed = self.grpo.sync_ref_model and self.grpo.ref_model_mixup_alpha < 1
        return is_mixed and self.model.dtype != "float32"

    @property
    def dims(self) -> ParallelDims:
        """The trainer's mesh; raises ValueError when the sizes are incompatible."""
        return self.parallel.dims

    @property
    def alignment(self) -> Alignment:
        """Multiples of the lengths of packed sequences and microbatches."""
        multiple = token_multiple(self.model.megatron)
        return Alignment.for_mesh(self.dims, self.parallel.sequence_parallel, multiple)
