"""The trainer: the keys of `model`, `train`, `optimizer` and `parallel`.

`model.megatron` may set some fields of Megatron-Core's TransformerConfig. All others are determined
by the model, the mesh or the trainer, would change what the model computes, have no effect, or are
not supported here.
"""

import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from megatron_grpo.config.section import Section
from parallel import ParallelDims

HUB_NAME = re.compile(r"(?!models/)[\w.-]+/[\w.-]+")
"""OWNER/NAME; the shipped configs have their models in `models`."""


class ModelConfig(Section):
    """The model to train."""

    path: Path = Field(strict=False)
    """Hugging Face folder: config.json, safetensors, tokenizer."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the weights in forward and backward; master weights and moments are float32."""
    freeze_moe_router: bool = False
    """With a mixture of experts, keep the weights of its routers as they were read."""
    megatron: dict[str, Any] = Field(default={})
    """Fields of Megatron-Core's TransformerConfig for speed, memory, rounding and the losses of
    routers; those listed above."""

    def check_folder(self, only_config: bool = False) -> None:
        """Raise ValueError, with the command that downloads the model, if it is not in `path`.

        `only_config`: of its files, config.json is enough.
        """
        if only_config and not (self.path / "config.json").is_file():
            problem = "has no config.json: plan needs only this file of a model"
        elif not self.path.is_dir():
            problem = "is not a folder: download the model first"
        else:
            return
        is_name = HUB_NAME.fullmatch(str(self.path)) and not self.path.exists()
        name = self.path if is_name else "OWNER/NAME"
        folder = Path("models", self.path.name) if is_name else self.path
        raise ValueError(
            f"model.path {self.path.absolute()} {problem}, "
            f"`hf download {name}{' config.json' if only_config else ''} --local-dir {folder}`"
            + (f", and set model.path={folder}" if is_name else "")
        )


class TrainConfig(Section):
    """Length, folder and limits of the run."""

    run_dir: Path = Field(strict=False)
    """Folder for everything the run writes; starting with the same folder again resumes the run."""
    init_from: Path | None = Field(default=None, strict=False)
    """Run directory, or RUN_DIR/checkpoints/step_N, whose weights and moments a new run starts
    from, at step 0; null: the weights in model.path."""
    num_steps: PositiveInt
    """Number of optimizer steps."""
    seed: NonNegativeInt = 42
    """Seed of the data order and of all sampling."""
    max_tokens_per_microbatch: PositiveInt = 4096
    """Maximum tokens, with alignment padding, in one forward pass of one model replica."""
    save_interval: PositiveInt = 10
    """Optimizer steps between checkpoints; the last step always writes one."""
    export_interval: PositiveInt | None = None
    """Optimizer steps between Hugging Face exports, each to a folder hf_step_N of its own; null:
    export only the end, to hf."""
    keep_checkpoints: PositiveInt = 2
    """Number of newest checkpoints to keep on disk."""
    keep_every: PositiveInt | None = None
    """Checkpoints whose step is a multiple of this are kept for good; a multiple of save_interval.
    Null: only the newest are kept."""
    hang_timeout: PositiveFloat | None = None
    """Seconds without progress in a training phase until the run is stopped; the first step has
    more. Null: 45, on GPUs 300, where the first save or evaluation may still compile kernels and
    make connections."""
    max_skipped_steps: PositiveInt = 3
    """Steps with a NaN or infinite loss or gradient are skipped; this many in a row stop the
    run."""
    log_tokens: NonNegativeInt = 4096
    """Tokens of each step whose values (log-probability, ratio, entropy, weight, ...) are written
    to tokens.jsonl, for `megatron-grpo view`; 0: none."""
    print_completions: NonNegativeInt = 0
    """Completions of each step to print, with their rewards."""
    profile_steps: tuple[PositiveInt, ...] = Field(default=(), strict=False)
    """Steps, counted from 1, that torch's profiler records, to `profile` in run_dir."""
    profile_ranks: tuple[NonNegativeInt, ...] = Field(default=(0,), strict=False)
    """Ranks whose profiles are recorded."""
    tensorboard: bool = False
    """Whether metrics are also written for TensorBoard, to `tensorboard` in run_dir; this needs the
    extra `tensorboard`."""

    @model_validator(mode="after")
    def _kept_steps_are_saved(self) -> Self:
        if self.keep_every and self.keep_every % self.save_interval:
            legal = self.save_interval * (self.keep_every // self.save_interval + 1)
            raise ValueError(
                f"train.keep_every {self.keep_every} is no multiple of train.save_interval "
                f"{self.save_interval}: set it to {legal}"
            )
        return self


class OptimizerConfig(Section):
    """AdamW and its learning rate schedule."""

    lr: PositiveFloat
    """Peak learning rate of AdamW, at most 1."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay, one step after the last step; at most lr."""
    lr_warmup_steps: NonNegativeInt = 0
    """Linear warm-up steps from 0: step 1 has learning rate 0, step lr_warmup_steps + 1 has lr."""
    lr_decay_style: Literal["constant", "cosine", "linear", "WSD"] = "constant"
    """Shape of the decay from lr to min_lr, from the end of the warm-up to train.num_steps; `WSD`:
    only in the last lr_wsd_decay_steps."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the decay at the end of WSD."""
    lr_wsd_decay_steps: PositiveInt | None = None
    """Optimizer steps of the decay at the end of WSD, which must be given."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of the first moment."""
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay rate of the second moment."""
    adam_eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum global norm of the gradients; larger ones are scaled down to it."""

    @model_validator(mode="after")
    def _lr_is_a_step(self) -> Self:
        if self.lr > 1:
            raise ValueError(
                f"optimizer.lr {self.lr:g}: AdamW would move each weight by about as much in every "
                "step: use at most 1, and for a language model something like 1e-6"
            )
        return self

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

    @model_validator(mode="after")
    def _wsd_is_whole(self) -> Self:
        steps, style = self.lr_wsd_decay_steps, self.lr_wsd_decay_style
        if self.lr_decay_style == "WSD":
            if steps is None:
                raise ValueError(
                    "optimizer.lr_decay_style WSD decays in the last steps: say in how many, as "
                    "optimizer.lr_wsd_decay_steps"
                )
            return self
        default = type(self).model_fields["lr_wsd_decay_style"].default
        for name, value, idle in ("steps", steps, None), ("style", style, default):
            if value != idle:
                raise ValueError(
                    f"optimizer.lr_wsd_decay_{name} {value} does nothing without "
                    "optimizer.lr_decay_style=WSD: set that, or leave it out"
                )
        return self


class ParallelConfig(Section):
    """Sizes of the trainer's mesh; ranks = tensor * pipeline * context * data."""

    tensor_parallel_size: PositiveInt = 1
    """Ranks that split the matrices of every layer."""
    pipeline_parallel_size: PositiveInt = 1
    """Ranks that split the layers into stages."""
    virtual_pipeline_parallel_size: PositiveInt = 1
    """Model chunks per pipeline rank (interleaved 1F1B)."""
    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    """Layers of the first pipeline rank, in all its chunks; null: as even as possible."""
    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    """Layers of the last pipeline rank, which also computes the logits; null: as even as
    possible."""
    context_parallel_size: PositiveInt = 1
    """Ranks that split every sequence."""
    expert_parallel_size: PositiveInt = 1
    """Ranks that the experts of each layer are distributed over, whole; 1 for dense models."""
    expert_tensor_parallel_size: PositiveInt = Field(
        default_factory=lambda data: data["tensor_parallel_size"]
    )
    """Ranks that split the matrices of each expert; default: tensor_parallel_size."""
    data_parallel_size: PositiveInt = 1
    """Replicas of the model."""
    sequence_parallel: bool = Field(default_factory=lambda data: data["tensor_parallel_size"] > 1)
    """Whether tensor-parallel ranks also split the activations between matrices; default: true when
    tensor_parallel_size is above 1."""

    @model_validator(mode="after")
    def _sequence_parallel_has_ranks(self) -> Self:
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "parallel.sequence_parallel=true splits over tensor-parallel ranks and "
                "parallel.tensor_parallel_size is 1: leave it out, or raise tensor_parallel_size"
            )
        return self

    @model_validator(mode="after")
    def _first_and_last_stage_differ(self) -> Self:
        for end in ("first", "last"):
            name = f"num_layers_in_{end}_pipeline_stage"
            if getattr(self, name) is not None and self.pipeline_parallel_size == 1:
                raise ValueError(
                    f"parallel.{name} splits layers over pipeline ranks and "
                    f"parallel.pipeline_parallel_size is 1: set {name}=null, or raise "
                    "pipeline_parallel_size"
                )
        return self

    @property
    def dims(self) -> ParallelDims:
        """The mesh; raises ValueError when the sizes are incompatible."""
        return ParallelDims(
            tensor=self.tensor_parallel_size,
            pipeline=self.pipeline_parallel_size,
            virtual_pipeline=self.virtual_pipeline_parallel_size,
            context=self.context_parallel_size,
            expert=self.expert_parallel_size,
            expert_tensor=self.expert_tensor_parallel_size,
            data=self.data_parallel_size,
            num_layers_in_first_pipeline_stage=self.num_layers_in_first_pipeline_stage,
            num_layers_in_last_pipeline_stage=self.num_layers_in_last_pipeline_stage,
        )


PERFORMANCE_FIELDS = (
    "apply_rope_fusion",
    "attention_backend",
    "batch_p2p_sync",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "clone_scatter_output_in_embedding",
    "deterministic_mode",
    "disable_bf16_reduced_precision_matmul",
    "gradient_accumulation_fusion",
    "moe_permute_fusion",
    "moe_router_dtype",
    "moe_router_fusion",
    "recompute_granularity",
    "recompute_method",
    "recompute_modules",
    "recompute_num_layers",
    "transformer_impl",
)
"""Fields that change only speed, memory or rounding: a resumed run may change them."""

ROUTER_LOSS_FIELDS = (
    "moe_aux_loss_coeff",
    "moe_router_load_balancing_type",
    "moe_z_loss_coeff",
)
"""Fields of the auxiliary losses of a mixture's routers, which change what the model learns."""

LEGAL_VALUES = {
    "attention_backend": ("auto", "flash", "fused", "unfused"),
    "moe_router_dtype": ("fp32", "fp64"),
    # A packed microbatch is many sequences, to which seq_aux_loss would give one loss. The weight
    # of global_aux_loss would depend on the number of data ranks.
    "moe_router_load_balancing_type": ("aux_loss", "none"),
}
"""Legal values of fields of which Megatron accepts more, or ignores what it does not know."""
