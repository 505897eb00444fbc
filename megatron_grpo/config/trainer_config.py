"""The trainer: the keys of `model`, `train`, `optimizer` and `parallel`."""

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

from megatron_grpo.config.config_section import Section
from parallel import ParallelDims


class ModelConfig(Section):
    """Which model is trained."""

    path: Path = Field(strict=False)
    """Hugging Face folder: config.json, safetensors, tokenizer."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights in forward and backward; master weights and moments are float32."""
    megatron: dict[str, Any] = Field(default={})
    """Fields of Megatron-Core's TransformerConfig, passed through."""


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
