"""The trainer: the keys of `model`, `train` and `parallel`."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from checkpoint_convert.quantized.scheme import Quantization
from megatron_grpo.config.megatron_fields import DEEPEP_RANKS, uses_deepep
from megatron_grpo.config.offload import Offload
from megatron_grpo.config.section import Mistake, Section
from parallel import ParallelDims

HUB_NAME = re.compile(r"(?!models/)[\w.-]+/[\w.-]+")
"""OWNER/NAME, but not a path below `models/`, the folder of the shipped configs' models."""


class ModelConfig(Section):
    """The model to train."""

    path: Path = Field(strict=False)
    """Hugging Face folder with config.json, safetensors and tokenizer."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the weights in forward and backward; master weights are float32."""
    freeze_moe_router: bool = False
    """Leave the weights of a mixture's routers untrained."""
    freeze_vision: bool = True
    """Leave the vision tower's weights untrained; false: train them on prompts with images."""
    mtp_num_layers: Literal[0, 1] = 0
    """1: also train the layer for multi-token prediction, with which engines draft (method `mtp` of
    rollout.vllm.speculative_config), on sampled tokens. The policy's training does not change."""
    megatron: dict[str, Any] = Field(default={})
    """Fields of Megatron-Core's TransformerConfig for speed, memory, rounding and the losses of
    routers: the list above."""

    def check_folder(self, only_config: bool = False) -> None:
        """Raise ValueError, with the command that downloads the model, if `path` lacks it.

        With `only_config`, config.json is enough.
        """
        run = self.path.parents[1] if self.path.parent.name == "checkpoints" else self.path
        if (run / "checkpoints").is_dir() and not (self.path / "config.json").is_file():
            raise ValueError(
                f"model.path {self.path} has Megatron checkpoints of a run: give {run / 'hf'}, or "
                "the folder of `checkpoint-convert export --megatron "
                f"{run}/checkpoints/step_N --out FOLDER`"
            )
        if only_config and not (self.path / "config.json").is_file():
            problem = "has no config.json: plan needs only this file of a model"
        elif not self.path.is_dir():
            problem = "is not a folder: give its path from here, or download the model first"
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


class Hook(Section):
    """A class of yours whose methods rank 0 calls during the run (docs/hooks.md)."""

    name: str
    """`file.py:ClassName`."""
    arguments: dict[str, Any] = Field(default={})
    """Keyword arguments of the class."""

    @property
    def label(self) -> str:
        """Name in the timeline: the class's name without its file."""
        return self.name.rpartition(":")[2]

    @field_validator("name")
    @classmethod
    def _names_a_class(cls, value: str) -> str:
        if not all(value.rpartition(":")):
            raise ValueError(f"train.hooks {value!r} is not of the form file.py:ClassName")
        return value


class TrainConfig(Section):
    """Length, folder and limits of the run."""

    run_dir: Path = Field(strict=False)
    """Folder for the run's files; a start with an existing folder resumes its run."""
    init_from: Path | None = Field(default=None, strict=False)
    """Run directory, RUN_DIR/checkpoints/step_N or RUN_DIR/checkpoints/best, whose weights and
    moments a new run starts with at step 0; null: the weights in model.path."""
    num_steps: PositiveInt | None = None
    """Optimizer steps of the run; required unless num_epochs is given."""
    num_epochs: PositiveInt | None = None
    """Passes over the prompts, from which the number of optimizer steps follows; dynamic_sample's
    extra prompts do not count."""
    seed: NonNegativeInt = 42
    """Seed of the data order and of all sampling."""
    max_tokens_per_microbatch: PositiveInt = 4096
    """Maximum tokens, with alignment padding, in one forward pass of a model replica."""
    offload: Offload = "none"
    """State in host memory while engines in sleep mode use the GPU: `optimizer` (moments and master
    weights; gradients are freed), `all` (also weights and reference), or a list of `gradients`,
    `optimizer`, `weights`, `reference`."""
    offload_communicators: bool = False
    """With weights offloaded, also move NCCL's NVLink and PCIe buffers to the host while engines
    generate."""
    save_interval: PositiveInt = 10
    """Optimizer steps between checkpoints, each written at the first end of a generation from then
    on. The last step always writes one."""
    export_interval: PositiveInt | None = None
    """Optimizer steps between Hugging Face exports, to folders hf_step_N; null: only the final one,
    to hf."""
    export_quantization: Quantization = "none"
    """Format of linear layers' weights in exports, for vLLM and SGLang: `fp8` (blocks of 128 x
    128), `fp8_channel` or `int8` (a scale per row), or `nvfp4` (4 bits, blocks of 16); `none`:
    model.dtype."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints to keep on disk."""
    keep_every: PositiveInt | None = None
    """Keep the first checkpoint at or after each multiple of this many steps for good; a multiple
    of save_interval. Null: keep only the newest."""
    keep_best: str | None = None
    """Metric of the evaluations, such as `eval/pass@1`: the checkpoint with its highest value so
    far stays, as checkpoints/best, until a better one is written. Null: none."""
    hooks: tuple[Hook, ...] = Field(default=(), strict=False)
    """Classes that are called after steps, evaluations and checkpoints, and may end the run: each
    `file.py:ClassName`, or a table with name and arguments (docs/hooks.md)."""
    hang_timeout: PositiveFloat | None = None
    """Seconds without progress in a training phase that stop the run; null: 45, on GPUs 300. The
    first step, phases that took long before and computation on CPUs get more (docs/cluster.md);
    time in which the job is suspended does not count."""
    max_skipped_steps: PositiveInt = 3
    """Consecutive steps with a NaN or infinite loss or gradient that stop the run; fewer are
    skipped."""
    save_generations: bool = False
    """Write every generation to `generations` in run_dir, for replay."""
    replay: Path | None = Field(default=None, strict=False)
    """Run directory whose saved generations are trained on, without engines; null: engines
    generate."""
    log_tokens: NonNegativeInt = 4096
    """Tokens per step whose values (log-probability, ratio, entropy, weight, ...) go to
    tokens.jsonl, for `megatron-grpo view`; 0: none."""
    print_completions: NonNegativeInt = 0
    """Completions of each step to print, with their rewards."""
    profile_steps: tuple[PositiveInt, ...] = Field(default=(), strict=False)
    """Steps, counted from 1, that torch's profiler records to `profile` in run_dir."""
    profile_ranks: tuple[NonNegativeInt, ...] = Field(default=(0,), strict=False)
    """Ranks whose profiles are recorded."""
    tensorboard: bool = False
    """Also write metrics for TensorBoard, to `tensorboard` in run_dir; needs the extra
    `tensorboard`."""

    @field_validator("hooks", mode="before")
    @classmethod
    def _names_are_hooks(cls, value: Any) -> Any:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError("train.hooks is a list: write [file.py:ClassName]")
        return [{"name": item} if isinstance(item, str) else item for item in value]

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        if (self.num_steps is None) == (self.num_epochs is None):
            given = "missing" if self.num_steps is None else f"{self.num_steps}, with num_epochs"
            remedies = ("train.num_epochs=null", "train.num_steps=null") if self.num_steps else ()
            raise Mistake(
                f"train.num_steps is {given}: give either the number of optimizer steps or, as "
                "train.num_epochs, of passes over the prompts, and set the other to null",
                *remedies,
            )
        if self.keep_every and self.keep_every % self.save_interval:
            legal = self.save_interval * (self.keep_every // self.save_interval + 1)
            raise Mistake(
                f"train.keep_every {self.keep_every} is no multiple of train.save_interval "
                f"{self.save_interval}: set it to {legal}",
                f"train.keep_every={legal}",
            )
        return self


@cache
def _mesh(**sizes: Any) -> ParallelDims:
    """Cached, because a plan asks for it a million times."""
    return ParallelDims(**sizes)


class ParallelConfig(Section):
    """Sizes of the trainer's mesh; ranks = tensor * pipeline * context * data."""

    tensor_parallel_size: PositiveInt = 1
    """Ranks that split the matrices of every layer."""
    pipeline_parallel_size: PositiveInt = 1
    """Ranks that split the layers into stages."""
    virtual_pipeline_parallel_size: PositiveInt = 1
    """Model chunks per pipeline rank (interleaved 1F1B)."""
    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    """Layers of the first pipeline rank, in all its chunks; null: an even split."""
    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    """Layers of the last pipeline rank, which also computes the logits; null: an even split."""
    context_parallel_size: PositiveInt = 1
    """Ranks that split every sequence."""
    dynamic_context_parallel: bool = False
    """Split each microbatch over as few context ranks as its longest sequence needs; the other
    ranks compute other microbatches. Short sequences then need no exchange."""
    expert_parallel_size: PositiveInt = 1
    """Ranks that each hold whole experts of every layer; 1 for dense models."""
    expert_tensor_parallel_size: PositiveInt = Field(
        default_factory=lambda data: data["tensor_parallel_size"]
    )
    """Ranks that split the matrices of each expert; default: tensor_parallel_size."""
    data_parallel_size: PositiveInt = 1
    """Replicas of the model."""
    sequence_parallel: bool = Field(default_factory=lambda data: data["tensor_parallel_size"] > 1)
    """Whether tensor-parallel ranks also split the activations between matrices; default: true if
    tensor_parallel_size is above 1."""
    overlap_grad_reduce: bool = False
    """Sum gradients over data and context ranks bucket by bucket during the last backward of a
    step; false: after it."""
    overlap_param_gather: bool = False
    """Gather updated weights over data and context ranks bucket by bucket during the next forward;
    false: right after the update. A push gathers them first."""

    @property
    def dims(self) -> ParallelDims:
        """The mesh; raises ValueError for incompatible sizes."""
        return _mesh(
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

    def check_dispatch(self, megatron: Mapping[str, Any]) -> None:
        """Raise ValueError if DeepEP has no settings for the number of ranks that share experts."""
        sizes = self.expert_parallel_size, self.expert_tensor_parallel_size
        if not uses_deepep(megatron) or prod(sizes) in (1, *DEEPEP_RANKS):
            return
        raise Mistake(
            f"model.megatron.moe_token_dispatcher_type flex: DeepEP sends tokens among "
            f"{', '.join(map(str, DEEPEP_RANKS))} ranks, and expert({sizes[0]}) * "
            f"expert_tensor({sizes[1]}) = {prod(sizes)}: change parallel.expert_parallel_size, or "
            "use alltoall",
            "model.megatron.moe_token_dispatcher_type=alltoall",
        )
