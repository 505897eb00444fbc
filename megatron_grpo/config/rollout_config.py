"""Engines: the keys of `rollout`."""

from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megatron_grpo.config.config_section import Section

LEAST_TEMPERATURE = 0.01
"""vLLM takes anything lower for this, but 0, which is greedy."""


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
