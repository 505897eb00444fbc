"""Multimodal models, by the `model_type` of their config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SglangImages:
    """Values that SGLang (0.5.23) fixes for all models of this kind; None: it reads config.json."""

    patch_values: int | None = None
    """Values per patch; it takes patches of any other number for finished features."""
    text_rms_norm_eps: float | None = None
    """Epsilon of the vision tower's norms, which it reads from the text's config."""
    num_levels: int | None = None
    """Number of decoder layers to whose outputs image features are added."""


@dataclass(frozen=True)
class Images:
    """Image inputs of a model; `families/vision.py` describes its tower, which may be trained."""

    alternates_axes: bool
    """Whether RoPE's frequencies of height and width alternate."""
    has_levels: bool
    """Whether image features are added to outputs of decoder layers, listed in config.json."""
    sglang: SglangImages


@dataclass(frozen=True)
class Multimodal:
    """How config.json describes a model's text tower, and whether images are supported."""

    text: Mapping[str, str]
    """Family of the tower, by the `model_type` of `text_config`."""
    has_defaults_of_family: bool = False
    """Whether `text_config` has the family's own config class; otherwise it must have the keys
    whose defaults differ."""
    explicit: tuple[str, ...] = ()
    """Further keys that `text_config` must have."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `text_config`, each with the only value that transformers has for this model."""
    is_tied_by_text: bool = True
    """Whether transformers ties the head where only `text_config` says so."""
    images: Images | None = None
    """None: the model is trained and served on text alone."""


# Qwen's RoPE (`mrope`) has three positions per token, which are equal for text.
MULTIMODAL = {
    "gemma3": Multimodal({"gemma3_text": "gemma3_text"}, has_defaults_of_family=True),
    "kimi_k25": Multimodal({"kimi_k2": "kimi_k2", "deepseek_v3": "deepseek_v3"}),
    "mistral3": Multimodal({"mistral": "mistral", "ministral3": "ministral3"}),
    "qwen2_5_vl": Multimodal(
        {"qwen2_5_vl_text": "qwen2"},
        images=Images(
            alternates_axes=False, has_levels=False, sglang=SglangImages(patch_values=1176)
        ),
    ),
    "qwen3_5": Multimodal({"qwen3_5_text": "qwen3_5_text"}, is_tied_by_text=False),
    "qwen3_5_moe": Multimodal({"qwen3_5_moe_text": "qwen3_5_moe_text"}, is_tied_by_text=False),
    "qwen3_vl": Multimodal(
        {"qwen3_vl_text": "qwen3"},
        is_tied_by_text=False,
        images=Images(
            alternates_axes=True, has_levels=True, sglang=SglangImages(text_rms_norm_eps=1e-6)
        ),
    ),
    "qwen3_vl_moe": Multimodal(
        {"qwen3_vl_moe_text": "qwen3_moe"},
        explicit=("num_experts", "moe_intermediate_size", "num_experts_per_tok", "norm_topk_prob"),
        required={"norm_topk_prob": True},
        is_tied_by_text=False,
        images=Images(
            alternates_axes=True,
            has_levels=True,
            sglang=SglangImages(text_rms_norm_eps=1e-6, num_levels=3),
        ),
    ),
}
WITH_IMAGES = {kind: model.images for kind, model in MULTIMODAL.items() if model.images}
