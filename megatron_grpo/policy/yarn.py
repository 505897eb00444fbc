"""YaRN: RoPE for sequences longer than those that a model was trained on (arXiv 2309.00071).

YaRN slows RoPE's rotations, and multiplies queries and keys by an attention factor. Megatron-Core's
own YaRN multiplies cosines and sines by that factor, but with packed sequences Transformer Engine's
fused RoPE takes only angles, and the factor is lost without a word. Here it becomes part of the
softmax scale, which every attention takes: torch's, Transformer Engine's and flex. That is the same
where whole heads are rotated, and of latents the factor is one for both parts of a head.
"""

from collections.abc import Mapping
from math import ceil, floor, log, pi
from typing import Any

import torch
from torch import Tensor

from checkpoint_convert import ModelShape


def yarn_scaling(shape: ModelShape) -> Mapping[str, Any] | None:
    """The model's `rope_scaling`, if it is YaRN's."""
    scaling = shape.rope_scaling
    return scaling if scaling is not None and scaling["rope_type"] == "yarn" else None


def yarn_softmax_scale(head_dim: int, scaling: Mapping[str, Any]) -> float:
    """The scale of scores that replaces ``head_dim ** -0.5``."""
    factor: float = scaling["attention_factor"]
    return factor**2 * head_dim**-0.5


def yarn_frequencies(inv_freq: Tensor, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """Scale RoPE's angles per position, [rotary_dim / 2], by "NTK-by-parts" (section 3.2).

    Pairs of dimensions that turn more than `beta_fast` times within the trained length keep their
    frequency, those that turn less than `beta_slow` times become `factor` times slower, and in
    between there is a ramp. It is linear in the index of the pair, as in transformers and vLLM,
    where the paper has it linear in the number of turns.
    """
    rotary_dim = 2 * len(inv_freq)

    def pair(turns: float) -> float:
        """The index of the pair that turns so often within the trained length, as a real number."""
        wavelength = scaling["original_max_position_embeddings"] / turns
        return rotary_dim * log(wavelength / (2 * pi)) / (2 * log(theta))

    first, last = pair(scaling["beta_fast"]), pair(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(len(inv_freq), device=inv_freq.device)
    slowed = ((pairs - first) / (last - first)).clamp(0, 1)
    return inv_freq / scaling["factor"] * slowed + inv_freq * (1 - slowed)
