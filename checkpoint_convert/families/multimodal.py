"""Models with other towers beside that of text, by the `model_type` of their config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SglangImages:
    """Values that SGLang (0.5.23) has for every model of this kind; None: it reads them."""

    patch_values: int | None = None
    """Number of values of a patch: those of other patches are taken for features."""
    text_rms_norm_eps: float | None = None
    """The tower's, which it takes from the text."""
    num_levels: int | None = None
    """Number of decoder layers to whose outputs features are added."""


@dataclass(frozen=True)
class Images:
    """How it sees images. Then `families/vision.py` describes its tower, which may be trained."""

    alternates_axes: bool
    """Whether RoPE's frequencies of height and width alternate."""
    has_levels: bool
    """Whether features are added to the outputs of decoder layers, which config.json lists."""
    sglang: SglangImages


@dataclass(frozen=True)
class Multimodal:
    """How config.json describes the text tower of a model, and what else of it is supported."""

    text: Mapping[str, str]
    """Family of the tower, by the `model_type` of `text_config`."""
    has_defaults_of_family: bool = False
    """Whether `text_config` is of the family's own config class; otherwise it must have the keys
    that the two classes assume differently."""
    explicit: tuple[str, ...] = ()
    """Further keys that it must have."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `text_config`, each with the only value that transformers has for this model."""
    is_tied_by_text: bool = True
    """Whether transformers ties the head where only `text_config` says so."""
    images: Images | None = None
    """None: it is trained and served on text alone."""


# Of text, the three positions of a token in Qwen's RoPE (`mrope`) are equal.
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
