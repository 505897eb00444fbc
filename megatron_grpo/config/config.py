"""The configuration of a run: every key, its type, its default and what it means.

Checked here is what the config alone can judge; `preflight.py` asks the model, the engines and, by
`prompt_checks.py`, the data. Nothing here imports torch, so that a mistake is told at once.
`config_file.py` reads and writes configs as YAML.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from megatron_grpo.config.config_section import Section
from megatron_grpo.config.grpo_config import GRPOConfig
from parallel import ParallelDims

LEAST_TEMPERATURE = 0.01
"""vLLM takes anything lower for this, but 0, which is greedy."""
ENVIRONMENT_TERM = "environment"
"""The label of an environment's reward, beside those of the reward functions."""


class ModelConfig(Section):
    """Which model is trained."""

    path: Path = Field(strict=False)
    """Hugging Face folder: config.json, safetensors, tokenizer."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights in forward and backward; master weights and moments are float32."""
    megatron: dict[str, Any] = Field(default={})
    """Fields of Megatron-Core's TransformerConfig, passed through."""


class DataConfig(Section):
    """Where prompts come from and how a row becomes a prompt."""

    path: str
    """A .jsonl or .parquet file, a folder of them, or the name of a Hugging Face data set."""
    subset: str | None = None
    """Configuration of a Hugging Face data set, such as `main` of openai/gsm8k."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    prompt_column: str = "prompt"
    """Column with the question: a string, or a list of chat messages."""
    answer_column: str | None = "answer"
    """Column with the reference answer, which rewards get under the name `answer`; null: none."""
    system_prompt: str | None = None
    """Put before every prompt as the system message; needs the chat template."""
    apply_chat_template: bool = True
    """Whether prompts go through the tokenizer's chat template; false sends the raw text."""
    max_prompt_length: PositiveInt | None = None
    """Leave out rows whose prompt has more tokens. null: a prompt that does not fit is an error."""
    on_invalid: Literal["error", "skip"] = "error"
    """What to do about rows that cannot be used: list them and stop, or leave them out."""
    shuffle: bool = True
    """Whether every epoch has its own order, derived from train.seed; false: the order of rows."""

    @model_validator(mode="after")
    def _system_prompt_needs_template(self) -> Self:
        if self.system_prompt is not None and not self.apply_chat_template:
            raise ValueError(
                "data.system_prompt is a chat message: it needs data.apply_chat_template=true"
            )
        return self


class TrainConfig(Section):
    """Length, place and budget of the run."""

    run_dir: Path = Field(strict=False)
    """Folder of everything that the run writes; the same folder again resumes the run."""
    num_steps: PositiveInt
    """Optimizer steps."""
    seed: NonNegativeInt = 42
    """Seed of the order of the data and of every sample."""
    max_tokens_per_microbatch: PositiveInt = 4096
    """Most tokens, alignment included, in one forward of one model copy."""
    save_interval: PositiveInt = 10
    """Optimizer steps between checkpoints; one is always written at the end."""
    export_interval: PositiveInt | None = None
    """Optimizer steps between Hugging Face exports; null: only at the end."""
    keep_checkpoints: PositiveInt = 2
    """Number of newest checkpoints that stay on disk."""
    hang_timeout: PositiveFloat = 45.0
    """Seconds without progress, in training, until the run ends; the first step has more."""
    max_skipped_steps: PositiveInt = 3
    """Steps with a NaN or infinite loss or gradient are skipped; so many in a row stop the run."""


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    lr: PositiveFloat
    """Peak learning rate of AdamW."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay, which is one step after the last."""
    lr_warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from 0: step 1 has rate 0, step lr_warmup_steps + 1 has lr."""
    lr_decay_style: Literal["constant", "cosine", "linear"] = "constant"
    """Shape of the decay from lr to min_lr, from the end of the warm-up to train.num_steps."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    adam_eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""

    @model_validator(mode="after")
    def _decay_goes_down(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(
                f"optimizer.min_lr {self.min_lr} is above optimizer.lr {self.lr}: "
                f"use at most {self.lr}"
            )
        if self.min_lr > 0 and self.lr_decay_style == "constant":
            raise ValueError(
                f"optimizer.min_lr {self.min_lr} does nothing with optimizer.lr_decay_style "
                "constant: use cosine or linear, or optimizer.min_lr=0"
            )
        return self


class ParallelConfig(Section):
    """Sizes of the trainer's mesh; ranks = tensor * pipeline * context * data."""

    tensor_parallel_size: PositiveInt = 1
    """Ranks that share every layer's matrices."""
    pipeline_parallel_size: PositiveInt = 1
    """Ranks that share the layers."""
    virtual_pipeline_parallel_size: PositiveInt = 1
    """Model chunks per pipeline rank (interleaved 1F1B)."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share every sequence."""
    expert_parallel_size: PositiveInt = 1
    """Number of parts into which the experts of a layer are divided, whole experts each; 1 for
    dense models."""
    expert_tensor_parallel_size: PositiveInt = Field(
        default_factory=lambda data: data["tensor_parallel_size"]
    )
    """Ranks that share the matrices of each expert; by default tensor_parallel_size."""
    data_parallel_size: PositiveInt = 1
    """Copies of the model."""
    sequence_parallel: bool = Field(default_factory=lambda data: data["tensor_parallel_size"] > 1)
    """Whether tensor-parallel ranks also share the activations between matrices; default: yes."""

    @model_validator(mode="after")
    def _sequence_parallel_has_ranks(self) -> Self:
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "parallel.sequence_parallel=true splits over tensor-parallel ranks and "
                "parallel.tensor_parallel_size is 1: leave it out, or raise tensor_parallel_size"
            )
        return self

    @property
    def dims(self) -> ParallelDims:
        """The mesh; raises ValueError when the sizes cannot stand together."""
        return ParallelDims(
            tensor=self.tensor_parallel_size,
            pipeline=self.pipeline_parallel_size,
            virtual_pipeline=self.virtual_pipeline_parallel_size,
            context=self.context_parallel_size,
            expert=self.expert_parallel_size,
            expert_tensor=self.expert_tensor_parallel_size,
            data=self.data_parallel_size,
        )


class RolloutConfig(Section):
    """The engines that generate completions."""

    engine: Literal["vllm", "transformers"] = "vllm"
    """Which server generates; `transformers` is slow and needs no vLLM."""
    base_urls: tuple[str, ...] = Field(default=(), strict=False)
    """Engines that run already, such as http://host:8000; empty: they are started with the run."""
    num_engines: PositiveInt = Field(default_factory=lambda data: len(data["base_urls"]) or 1)
    """Number of engines; by default the number of base_urls, else 1."""
    tensor_parallel_size: PositiveInt = 1
    """Ranks of one engine."""
    temperature: float = Field(default=1.0, ge=LEAST_TEMPERATURE)
    """Divides the logits, in the engine and in the trainer."""
    top_p: float = 1.0
    """Only 1: the trainer cannot reproduce a cut distribution."""
    top_k: int = -1
    """Only -1: the trainer cannot reproduce a cut distribution."""
    max_completion_length: PositiveInt
    """Most tokens per completion, end token and observations included."""
    async_generate: bool = False
    """Generate a batch while the one before is trained on: samples are a generation older."""
    startup_timeout: PositiveFloat = 300.0
    """Seconds until a started engine must answer."""
    request_timeout: PositiveFloat = 600.0
    """Seconds until an engine must have answered one request."""
    health_timeout: PositiveFloat = 30.0
    """Seconds until an engine must have answered a health probe; else it is lost."""
    stall_timeout: PositiveFloat = 120.0
    """Seconds in which an engine that has requests must generate a token; else it is lost."""
    vllm: dict[str, Any] = Field(default={})
    """Fields of vLLM's EngineArgs, passed through."""
    update_weights_bucket_megabytes: PositiveInt = 512
    """Most megabytes of buffers in one process while new weights go to the engines."""
    weight_transport: Literal["auto", "network"] = "auto"
    """`auto`: memory that both ends share (host or GPU), else the network; `network`: always."""

    @model_validator(mode="after")
    def _supported(self) -> Self:
        if self.top_p != 1.0 or self.top_k != -1:
            raise ValueError(
                f"rollout.top_p {self.top_p} and rollout.top_k {self.top_k} would sample from a "
                "cut distribution, whose log-probabilities the trainer cannot reproduce: "
                "use top_p 1.0 and top_k -1"
            )
        if self.engine == "transformers" and (self.tensor_parallel_size > 1 or self.vllm):
            raise ValueError(
                f"rollout.engine transformers runs in one process: rollout.tensor_parallel_size "
                f"{self.tensor_parallel_size} must be 1 and rollout.vllm {self.vllm} empty"
            )
        return self

    @model_validator(mode="after")
    def _addresses_fit(self) -> Self:
        if not self.base_urls:
            return self
        if self.num_engines != len(self.base_urls):
            raise ValueError(
                f"rollout.num_engines {self.num_engines} is not the number of rollout.base_urls "
                f"{len(self.base_urls)}: set it to {len(self.base_urls)}, or leave it out"
            )
        for url in self.base_urls:
            parts = urlsplit(url)
            if parts.username is not None:
                raise ValueError(
                    f"rollout.base_urls: the address of {parts.hostname} has a user in it, whom "
                    "the run directory would show: engines ask for MEGATRON_GRPO_TOKEN alone"
                )
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"rollout.base_urls: {url!r} is no address like http://host:8000")
        return self


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
    """Share of a generation's completions that may have a failed score, and are masked."""
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


class EvalConfig(Section):
    """Held-out prompts, and how they are sampled and scored: in training, and by the command.

    No gradient is taken of what is sampled here, so that it may be cut, or greedy.
    """

    data: DataConfig | None = None
    """Held-out prompts: keys as of `data`, by default with its values; null: no evaluation."""
    reward: RewardConfig | None = None
    """What scores completions: keys as of `reward`, by default with its values; null: the same."""
    interval: PositiveInt = 10
    """Optimizer steps between evaluations; one is before the first step, one after the last."""
    max_prompts: PositiveInt | None = None
    """The first so many of the prompts; null: all."""
    num_generations: PositiveInt = 1
    """Completions per prompt: the n of pass@k and mean@n."""
    k: tuple[PositiveInt, ...] = Field(
        strict=False, default_factory=lambda data: tuple(sorted({1, data["num_generations"]}))
    )
    """Each k of pass@k, at most num_generations; by default 1 and num_generations."""
    pass_threshold: float = 1.0
    """A completion passes when its reward, the weighted sum, is at least this."""
    temperature: float | None = Field(default=None, ge=0)
    """Divides the logits; 0 takes the likeliest token; null: rollout.temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the likeliest tokens that make up this probability; 1: from all."""
    top_k: int = -1
    """Sample from so many likeliest tokens; -1: from all."""
    max_completion_length: PositiveInt | None = None
    """Most tokens per completion, the end token included; null: rollout.max_completion_length."""

    @model_validator(mode="after")
    def _k_can_be_drawn(self) -> Self:
        if too_many := [k for k in self.k if k > self.num_generations]:
            raise ValueError(
                f"eval.k {too_many[0]} cannot be drawn of eval.num_generations "
                f"{self.num_generations}: raise that to {max(too_many)}, or lower k"
            )
        return self

    @model_validator(mode="after")
    def _can_be_sampled(self) -> Self:
        if self.temperature == 0 and self.num_generations > 1:
            raise ValueError(
                f"eval.temperature 0 makes eval.num_generations {self.num_generations} equal "
                "completions of a prompt: use eval.num_generations 1, or a temperature above 0"
            )
        if self.temperature is not None and 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"eval.temperature {self.temperature} would be taken for {LEAST_TEMPERATURE}: use "
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
        refused = {"window_size", "softmax_type", "fp8_dot_product_attention"}
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
