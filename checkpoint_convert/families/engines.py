"""Habits of the engines with a family: how they name, split and refuse it unlike the others."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Vllm:
    """Habits of vLLM (0.32, 0.33)."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Parts of names in the weight files, and what it has for each."""
    has_split_norms: bool = False
    """Whether workers split the weights of norms over all heads."""
    has_float32_router: bool = False
    """Whether an engine of any dtype keeps the matrix of the router in float32."""
    has_whole_shared_expert: bool = False
    """Whether workers of an engine with several groups of several workers each hold the whole
    shared expert."""
    has_mixed_windows: bool = True
    """Whether it serves models of which some layers have a window, and some have none."""
    renames_experts: bool = False
    """Whether it asks by `mlp.experts` whether experts are quantised, whatever the files have."""


@dataclass(frozen=True, kw_only=True)
class Sglang:
    """Habits of SGLang (0.5.23)."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Parts of vLLM's names of parameters, and what it has for each."""
    has_windows: bool = False
    """Whether it computes sliding windows; otherwise every layer attends to all tokens."""
    has_one_rope: bool = False
    """Whether layers with windows and without have one base of RoPE, which it reads outside of
    `rope_parameters`."""
    has_whole_embedding: bool = False
    """Whether each worker has the whole embedding, without padding, and takes it for the head."""
    drops_scales: bool = False
    """Whether it drops the scales of blocks that it loads: LlamaForCausalLM in its models/llama.py
    gives `weight_scale_inv` another name."""
    quantizes_latents: bool = False
    """Whether it always quantises down-projections of latents: its class does not say of which
    names in `modules_to_not_convert` it makes one matrix."""
    follows_stored_dtype: bool = False
    """Whether it makes some layers in the dtype that config.json names."""
    was_tried_in_groups: bool = False
    """Whether engines were tried with several groups of workers; with sparse attention, which only
    GPUs compute, what workers load."""
    loaded_as: str | None = None
    """Family whose class it is to take, as transformers has none; None: its own."""


@dataclass(frozen=True, kw_only=True)
class Engines:
    """Habits of each engine."""

    vllm: Vllm = Vllm()
    sglang: Sglang = Sglang()
