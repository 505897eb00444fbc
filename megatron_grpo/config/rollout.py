"""The rollout engines: the keys of `rollout`."""

import warnings
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from checkpoint_convert.quantized.scheme import EngineQuantization
from megatron_grpo.config.section import Mistake, Section

MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this, except 0, which is greedy."""


SGLANG_STOPS = 32
"""Maximum number of stop strings in SGLang."""


class RolloutConfig(Section):
    """The engines that generate completions."""

    engine: Literal["vllm", "sglang"] = "vllm"
    """Inference server of the engines."""
    python: Path | None = Field(default=None, strict=False)
    """Python interpreter of SGLang's environment, such as .venv-sglang/bin/python; null: the
    trainer's."""
    base_urls: tuple[str, ...] = Field(default=(), strict=False)
    """URLs of running engines, such as http://host:8000; empty: the run starts its engines."""
    num_engines: PositiveInt = Field(default_factory=lambda data: len(data["base_urls"]) or 1)
    """Number of engines; default: one per URL in base_urls, or 1."""
    tensor_parallel_size: PositiveInt = 1
    """Tensor-parallel ranks of each engine: at most the GPUs of a node, or a multiple of them."""
    data_parallel_size: PositiveInt = 1
    """Groups of tensor-parallel ranks in each engine of a mixture of experts (vLLM's data
    parallelism, SGLang's data-parallel attention). They share the experts; each has its own
    requests, attention and cache."""
    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE)
    """Sampling temperature, at least 0.01; the trainer divides its logits by it, too."""
    top_p: float = 1.0
    """Must be 1.0: the trainer cannot reproduce a truncated distribution."""
    top_k: int = -1
    """Must be -1: the trainer cannot reproduce a truncated distribution."""
    max_completion_length: PositiveInt
    """Maximum tokens per completion, including the end token and observations."""
    stop_token_ids: tuple[NonNegativeInt, ...] = Field(default=(), strict=False)
    """Tokens that end a completion or turn, besides the end tokens of config.json and tokenizer. A
    base model with a chat template needs the token that ends its turns."""
    stop: tuple[str, ...] = Field(default=(), strict=False)
    """Strings that end a completion or turn; the string stays in the completion."""
    tool_call_parser: str | None = None
    """Engine's parser of tool calls in agents' turns, such as hermes or qwen3_coder; reasoning has
    vllm.reasoning_parser or sglang.reasoning_parser."""
    max_staleness: NonNegativeInt = 0
    """Generations made ahead; samples are at most this many pushes old when training on them
    begins. 0: synchronous. Refused if engines share several GPUs with the ranks."""
    in_flight_updates: bool = False
    """Push weights while completions are in progress; they continue under the new weights. Required
    by a max_staleness above 1."""
    recompute_kv_cache: bool = True
    """Recompute keys and values of completions in progress after a push. False keeps those of older
    weights (PipelineRL, vLLM only) and saves the prefill; later tokens then mix versions."""
    over_sampling: float = Field(default=1.0, ge=1.0)
    """Factor of extra prompts at the engines, up to max_staleness + 1: the first complete groups
    make up the generation, and the others continue into later ones. Above 1 needs
    in_flight_updates."""
    async_generate: bool = False
    """Deprecated: true means max_staleness 1."""
    enable_sleep_mode: bool = False
    """Between generations, engines free the memory of weights and cache for the ranks on the same
    GPUs (vLLM's sleep level 2, SGLang's memory saver). Useless for engines on their own GPUs."""
    router_replay: bool = False
    """With a mixture of experts, train each token with the experts that the engine chose for it
    (R3, arXiv 2510.11370)."""
    indexer_replay: bool = False
    """With sparse attention, train each token with the tokens that the engine's indexers chose for
    it (Megatron-LM's `dsa_enable_indexer_replay`). SGLang only."""
    startup_timeout: PositiveFloat = 300.0
    """Seconds within which a started engine must answer."""
    request_timeout: PositiveFloat = 600.0
    """Seconds within which an engine must answer requests other than completions; for these see
    stall_timeout."""
    health_timeout: PositiveFloat = 30.0
    """Seconds within which an engine must answer a health probe; otherwise it counts as lost."""
    stall_timeout: PositiveFloat = 120.0
    """Seconds within which an engine with requests must generate a token, or it counts as lost."""
    quantization: EngineQuantization = "none"
    """Format of linear layers' weights in engines, which the ranks quantise for each push: `fp8`
    (blocks of 128 x 128), `fp8_channel` or `int8` (a scale per row; vLLM only); `none`:
    model.dtype."""
    quantization_ignore: list[str] = Field(default=[])
    r"""Modules whose weights stay in model.dtype, also in `train.export_quantization`: names in the
    weight files, or after `re:` a regular expression for their beginning, such as
    `re:model\.layers\.0\.` (compressed-tensors' `ignore`)."""
    quantization_aware: bool = False
    """Quantisation-aware training: forward and backward use quantised weights, and gradients update
    the unquantised ones. The format is the engines' or, with `quantization: none`, that of
    `train.export_quantization`; engines then hold its values in model.dtype."""
    max_quantization_gap: PositiveFloat = 0.05
    """Maximum mean difference of log-probabilities (nats) between ranks and quantised engines at
    the start of a run without a correction in `grpo`; above it, the run ends."""
    vllm: dict[str, Any] = Field(default={})
    """Fields of vLLM's EngineArgs, passed on unchanged."""
    sglang: dict[str, Any] = Field(default={})
    """Fields of SGLang's ServerArgs, passed on unchanged."""
    update_weights_bucket_megabytes: PositiveInt = 512
    """Maximum megabytes of buffers per process during a push."""
    weight_transport: Literal["auto", "network", "disk"] = "auto"
    """`auto`: shared host or GPU memory, else the network; `network`: the network only; `disk`: a
    folder in train.run_dir, for engines that share only a file system with the ranks."""

    @property
    def gpus_per_engine(self) -> int:
        """Workers of each engine, with one GPU each unless they run on CPUs."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def engine_size_text(self) -> str:
        """The keys behind `gpus_per_engine`, for messages."""
        groups = (
            f" and rollout.data_parallel_size {n}" if (n := self.data_parallel_size) > 1 else ""
        )
        return f"rollout.tensor_parallel_size {self.tensor_parallel_size}{groups}"

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, given: Any) -> Any:
        if not (isinstance(given, dict) and given.get("async_generate") is True):
            return given
        if (staleness := given.get("max_staleness", 1)) != 1:
            raise ValueError(
                f"rollout.async_generate true is the former name of rollout.max_staleness 1, and "
                f"rollout.max_staleness is {staleness}: leave out rollout.async_generate"
            )
        warnings.warn(
            "rollout.async_generate true is now called rollout.max_staleness 1: change its name",
            FutureWarning,
            stacklevel=2,
        )
        return {**given, "max_staleness": 1, "async_generate": False}

    @model_validator(mode="after")
    def _check_requests(self) -> Self:
        if self.max_staleness and self.over_sampling > self.max_staleness + 1:
            raise Mistake(
                f"rollout.over_sampling {self.over_sampling} has more prompts at the engines than "
                f"can be trained on within rollout.max_staleness {self.max_staleness}: set it to "
                f"at most {self.max_staleness + 1}",
                f"rollout.over_sampling={self.max_staleness + 1}",
            )
        if self.top_p != 1.0 or self.top_k != -1:
            raise Mistake(
                f"rollout.top_p {self.top_p} and rollout.top_k {self.top_k} would sample from a "
                "truncated distribution, whose log-probabilities the trainer cannot reproduce: "
                "use top_p 1.0 and top_k -1; eval.top_p and eval.top_k are free",
                "rollout.top_p=1.0 and rollout.top_k=-1",
            )
        if "" in self.stop:
            raise ValueError(
                f"rollout.stop {[*self.stop]} has an empty string: leave it out, or every "
                "completion would end at once"
            )
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        if self.engine == "sglang" and len(self.stop) > SGLANG_STOPS:
            raise ValueError(
                f"rollout.engine sglang takes at most {SGLANG_STOPS} strings in rollout.stop, not "
                f"{len(self.stop)}: leave some out, or use rollout.engine=vllm"
            )
        size, workers = self.sglang.get("ep_size", 1), self.gpus_per_engine
        if size not in (1, workers):
            raise ValueError(
                f"rollout.sglang.ep_size {size} is not 1, with which every worker has a part of "
                f"each expert, nor {workers}, the workers of an engine ({self.engine_size_text}), "
                "which then have whole experts: set it to one of these"
            )
        number = self.drafts.get("num_speculative_tokens")
        if self.drafts and (type(number) is not int or number < 1):
            raise ValueError(
                f"rollout.vllm.speculative_config.num_speculative_tokens is {number!r}: give the "
                "number of tokens of a draft, such as 2"
            )
        return self

    @field_validator("quantization", mode="before")
    @classmethod
    def _can_be_pushed(cls, value: object) -> object:
        if value == "nvfp4":
            raise ValueError(
                "nvfp4 is for exports alone (train.export_quantization): after loading, vLLM "
                "reorders such weights for its kernels, and none could be pushed: set it to fp8, "
                "fp8_channel or int8; to train for such an export, leave it out and set "
                "rollout.quantization_aware=true"
            )
        return value

    @model_validator(mode="after")
    def _check_addresses(self) -> Self:
        if not self.base_urls:
            return self
        if self.num_engines != len(self.base_urls):
            raise Mistake(
                f"rollout.num_engines {self.num_engines} is not the number of rollout.base_urls "
                f"{len(self.base_urls)}: set it to {len(self.base_urls)}, or leave it out",
                f"rollout.num_engines={len(self.base_urls)}",
            )
        for url in self.base_urls:
            parts = urlsplit(url)
            if parts.username is not None:
                raise ValueError(
                    f"rollout.base_urls: the address of {parts.hostname} has a user in it, which "
                    "would be written to the run directory: leave it out, as engines only check "
                    "MEGATRON_GRPO_TOKEN"
                )
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(
                    f"rollout.base_urls: {url!r} is not an address like http://host:8000"
                )
        return self

    @property
    def drafts(self) -> dict[str, Any]:
        """Table `speculative_config` of vLLM; empty if engines do not draft."""
        table = self.vllm.get("speculative_config")
        return table if isinstance(table, dict) else {}

    @property
    def drafts_with_mtp(self) -> bool:
        """Whether engines draft with a layer for multi-token prediction."""
        return str(self.drafts.get("method")).endswith("mtp")

    @property
    def num_speculative_tokens(self) -> int:
        """Tokens of an engine's draft; 0 without drafts."""
        return int(self.drafts.get("num_speculative_tokens", 0))
