"""Quirks of inference engines with a family: how they name, split and load it unlike others."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Vllm:
    """Quirks of vLLM (0.32, 0.33)."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Parts of weight-file names, with vLLM's replacement of each."""
    has_split_norms: bool = False
    """Whether workers split the weights of norms over all heads."""
    has_float32_router: bool = False
    """Whether an engine of any dtype keeps the matrix of the router in float32."""
    has_whole_shared_expert: bool = False
    """Whether every worker holds the whole shared expert in an engine with expert, tensor and data
    parallelism."""
    has_mixed_windows: bool = True
    """Whether it serves models where only some layers have a window."""
    has_output_bias: bool = True
    """Whether it computes a bias of attention's output projection; otherwise it drops it."""
    renames_experts: bool = False
    """Whether it looks for ignored experts as `mlp.experts`, unlike the weight files."""


@dataclass(frozen=True, kw_only=True)
class Sglang:
    """Quirks of SGLang (0.5.23)."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Parts of vLLM's parameter names, with SGLang's replacement of each."""
    has_windows: bool = False
    """Whether it computes sliding windows; otherwise every layer attends to all tokens."""
    has_one_rope: bool = False
    """Whether layers with and without windows share one RoPE base, read outside of
    `rope_parameters`."""
    has_whole_embedding: bool = False
    """Whether each worker has the whole embedding, unpadded, and uses it as the head."""
    drops_scales: bool = False
    """Whether it drops the scales of blocks that it loads: LlamaForCausalLM in its models/llama.py
    gives `weight_scale_inv` another name."""
    quantizes_latents: bool = False
    """Whether it always quantises down-projections of latents: its class does not map names in
    `modules_to_not_convert` to its fused matrix."""
    follows_stored_dtype: bool = False
    """Whether it creates some layers in the dtype that config.json names."""
    has_dense_layers: bool = True
    """Whether some layers of a mixture may have a dense MLP."""
    was_tried_in_groups: bool = False
    """Whether engines were tested with several groups of workers; for sparse attention, which needs
    GPUs, only loading was."""
    loaded_as: str | None = None
    """Family to load the model as, if transformers lacks its class; None: its own."""


@dataclass(frozen=True, kw_only=True)
class Engines:
    """Quirks of each engine."""

    vllm: Vllm = Vllm()
    sglang: Sglang = Sglang()
