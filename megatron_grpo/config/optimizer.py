"""AdamW or Muon: the keys of `optimizer`."""

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from megatron_grpo.config.section import Mistake, Section

OPTIMIZER_MEMORY_KEYS = (
    "grad_reduce_in_fp32",
    "use_precision_aware_optimizer",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
)
"""Keys of `optimizer` that change only memory, speed or rounding: a resumed run may change them."""

SLOWEST_BFLOAT16_DECAY = 1 - 2**-8
"""Largest decay rate of bfloat16 moments: above it, some would round back to their old value."""


class OptimizerConfig(Section):
    """AdamW or Muon, and the schedule of the learning rate."""

    optimizer: Literal["adam", "muon"] = "adam"
    """`adam` is AdamW. `muon` moves matrices by their orthogonalized momentum, and embedding, head
    and all else by AdamW (docs/formulas.md)."""
    lr: PositiveFloat
    """Peak learning rate, at most 1."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay, one step after the last; at most lr."""
    lr_warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up: step 1 has learning rate 0, step lr_warmup_steps + 1 has lr."""
    lr_decay_style: Literal["constant", "cosine", "linear", "WSD"] = "constant"
    """Shape of the decay from lr to min_lr, from the end of the warm-up to train.num_steps; `WSD`
    decays only in the last lr_wsd_decay_steps."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of WSD's decay."""
    lr_wsd_decay_steps: PositiveInt | None = None
    """Optimizer steps of WSD's decay; required for WSD."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of the first moment."""
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay rate of the second moment."""
    adam_eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay rate of Muon's (Nesterov) momentum."""
    muon_extra_scale_factor: PositiveFloat = 0.2
    """Root mean square of Muon's update of a full-rank matrix; 0.2 is about AdamW's, so that `lr`
    suits both (Moonlight, arXiv 2502.16982)."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of tensors with two or more dimensions, embedding, head and adapters
    included; norms and biases have none."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum global gradient norm; larger gradients are scaled down to it."""
    grad_reduce_in_fp32: bool = True
    """Whether gradients are summed in float32, over microbatches and ranks; false: in bfloat16,
    with half the memory and traffic."""
    use_precision_aware_optimizer: bool = False
    """Store of the float32 master weights only the 16 bits that the bfloat16 weights lack
    (lossless), and allow bfloat16 moments. Needs Transformer Engine and a GPU."""
    exp_avg_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the first moment; bfloat16 needs use_precision_aware_optimizer."""
    exp_avg_sq_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the second moment; bfloat16 needs use_precision_aware_optimizer."""
    optimizer_cpu_offload: bool = False
    """Keep master weights and moments in host memory; the CPU updates the weights."""
    optimizer_offload_fraction: float = Field(default=1.0, gt=0, le=1)
    """Fraction of the optimizer state that optimizer_cpu_offload keeps in host memory."""

    @model_validator(mode="after")
    def _check_rates(self) -> Self:
        if self.lr > 1:
            raise ValueError(
                f"optimizer.lr {self.lr:g}: with AdamW, each weight would move by about as much in "
                "every step, with Muon by muon_extra_scale_factor times that: use at most 1, and "
                "for a language model something like 1e-6"
            )
        if self.min_lr > self.lr:
            raise Mistake(
                f"optimizer.min_lr {self.min_lr} is above optimizer.lr {self.lr}: "
                f"use at most {self.lr}",
                f"optimizer.min_lr={self.lr}",
            )
        if self.min_lr > 0 and self.lr_decay_style == "constant":
            raise Mistake(
                f"optimizer.min_lr {self.min_lr} does nothing with optimizer.lr_decay_style "
                "constant: use cosine or linear, or optimizer.min_lr=0",
                "optimizer.lr_decay_style=cosine",
                "optimizer.min_lr=0",
            )
        if self.lr_decay_style == "WSD" and self.lr_wsd_decay_steps is None:
            raise ValueError(
                "optimizer.lr_decay_style WSD decays in the last steps: say in how many, as "
                "optimizer.lr_wsd_decay_steps"
            )
        for name, beta in ("exp_avg", "adam_beta1"), ("exp_avg_sq", "adam_beta2"):
            dtype, decay = getattr(self, f"{name}_dtype"), getattr(self, beta)
            if dtype == "bfloat16" and decay > SLOWEST_BFLOAT16_DECAY:
                raise Mistake(
                    f"optimizer.{beta} {decay} decays a moment by less per step "
                    f"than bfloat16 resolves, and optimizer.{name}_dtype is bfloat16: use at most "
                    f"{SLOWEST_BFLOAT16_DECAY}, or optimizer.{name}_dtype=float32",
                    f"optimizer.{name}_dtype=float32",
                    f"optimizer.{beta}={SLOWEST_BFLOAT16_DECAY}",
                )
        return self

    def schedule_mistakes(self, num_steps: int) -> Iterator[Mistake]:
        """Find what of the learning-rate schedule does not fit into `num_steps`."""
        warmup, decay = self.lr_warmup_steps, self.lr_wsd_decay_steps
        if warmup >= num_steps:
            yield Mistake(
                f"optimizer.lr_warmup_steps {warmup} must be below train.num_steps {num_steps}: "
                f"use at most {num_steps - 1}",
                f"optimizer.lr_warmup_steps={num_steps - 1}",
            )
        elif decay is not None and decay > num_steps - warmup:
            yield Mistake(
                f"optimizer.lr_wsd_decay_steps {decay} would begin before the warm-up ends, as "
                f"train.num_steps is {num_steps} and optimizer.lr_warmup_steps {warmup}: use at "
                f"most {num_steps - warmup}",
                f"optimizer.lr_wsd_decay_steps={num_steps - warmup}",
            )
