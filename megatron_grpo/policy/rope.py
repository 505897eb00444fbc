"""RoPE (arXiv 2104.09864): angles, their scaling, and the rows of a packed microbatch.

YaRN (arXiv 2309.00071) slows RoPE's rotations, and multiplies queries and keys by an attention
factor. Megatron-Core multiplies cosines and sines by the factor, but its fused RoPE of packed
sequences takes only angles and silently drops it (test_upstream: mscale). Here the factor is part
of the softmax scale, which every attention takes: torch's, Transformer Engine's and flex. Scores
are equal where whole heads are rotated; with latents the factor scales both parts of a head.
LongRoPE's factor scales the rotated part alone: see `attention.LongAttention`.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from math import ceil, floor, log, pi
from typing import Any

import torch
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.transformer.attention import Attention
from torch import Tensor

from checkpoint_convert import ModelShape
from megatron_grpo.policy.packed_params import PackedParams
from parallel.attention import PackedAttention
from parallel.groups import Groups


class PackedRotary(torch.nn.Module):
    """Replaces a GPTModel's rotary embedding: rows of one table, shared by all model chunks.

    Megatron's embedding caches a table for each of the last 32 lengths, but lengths rarely repeat.
    With `windowed`, the other RoPE of layers with a window, there are two tables:
    `WindowedAttention` chooses one. `axes` (M-RoPE, for images) give the position by which each
    frequency rotates: 0 time, 1 height, 2 width.
    """

    def __init__(self, rotary: Any, windowed: Any = None, axes: Sequence[int] = ()) -> None:
        super().__init__()
        self.rotary, self.windowed = rotary, windowed
        # A row of the table has all frequencies twice, for both halves of a head.
        self._axes = torch.tensor([*axes, *axes], device=rotary.inv_freq.device)
        self._table: Tensor | None = None  # as long as the longest sequence so far

    def get_rotary_seq_len(
        self, context: Any, decoder: Any, hidden: Any, config: Any, params: PackedParams
    ) -> PackedParams:
        """Called by Megatron for the argument of `forward`: the params, in place of a length."""
        return params

    def forward(self, params: PackedParams, **_: Any) -> Tensor:
        """Rows [T or longest sequence, 1, 1, rotary_dim] of a microbatch; [2, ...] if windowed."""
        length = params.rope_length
        if self._table is None or self._table.shape[-4] < length:
            self._table = self.rotary.get_emb(length)
            if self.windowed is not None:
                self._table = torch.stack([self._table, self.windowed.get_emb(length)])
        if params.rope_positions is None:
            # Cut to the longest sequence: Megatron would take T rows for one row per token
            # (`has_packed_freqs`), and ignore where sequences begin.
            return self._table[..., :length, :, :, :]
        rows = self._table[..., params.rope_positions, :, :, :]
        if params.rope_positions.dim() == 1:
            return rows
        by_time, by_height, by_width = rows
        of_image = torch.where(self._axes == 1, by_height, by_width)
        return torch.where(self._axes == 0, by_time, of_image)


def packed_rotary(shape: ModelShape, axes: Sequence[int]) -> PackedRotary | None:
    """RoPE for a model's chunks; None for a model without RoPE. `axes`: see `PackedRotary`."""
    if not shape.rotary_dim:
        return None
    windowed = None
    if shape.window_rope_theta is not None:
        windowed = _rotary(replace(shape, rope_theta=shape.window_rope_theta, rope_scaling=None))
    return PackedRotary(_rotary(shape), windowed, axes)


def _rotary(shape: ModelShape) -> RotaryEmbedding:
    """Angles for the rotated part of each head."""
    kind, scaling = shape.rope_type, dict(shape.rope_scaling or {})
    scaling.pop("rope_type", None)
    rotary = RotaryEmbedding(
        shape.rotary_dim,
        rotary_percent=1.0,
        rotary_base=shape.rope_theta,
        seq_len_interpolation_factor=scaling["factor"] if kind == "linear" else None,
    )
    if kind == "llama3":  # Megatron's constructor takes `factor` alone
        rotary.inv_freq = rotary._apply_scaling(rotary.inv_freq, **scaling)
    if kind == "longrope":
        factors = torch.tensor(scaling["short_factor"], device=rotary.inv_freq.device)
        pairs = torch.arange(0, shape.rotary_dim, 2, device=factors.device) / shape.rotary_dim
        rotary.inv_freq = 1.0 / (factors * shape.rope_theta**pairs)
    if kind == "yarn":
        rotary.inv_freq = yarn_frequencies(rotary.inv_freq, shape.rope_theta, scaling)
    return rotary


def yarn_scaling(shape: ModelShape) -> Mapping[str, Any] | None:
    """The model's `rope_scaling` if its type is yarn, else None."""
    return shape.rope_scaling if shape.rope_type == "yarn" else None


def yarn_frequencies(inv_freq: Tensor, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """Scale RoPE's angles per position, [rotary_dim / 2], by "NTK-by-parts" (section 3.2).

    Pairs of dimensions with more than `beta_fast` turns within the trained length keep their
    frequency; pairs with less than `beta_slow` turns become `factor` times slower. The ramp in
    between is linear in the index of the pair, as in transformers and vLLM; the paper's is linear
    in the number of turns.
    """
    rotary_dim = 2 * len(inv_freq)

    def pair(turns: float) -> float:
        """Real-valued index of the pair with `turns` turns within the trained length."""
        wavelength = scaling["original_max_position_embeddings"] / turns
        return rotary_dim * log(wavelength / (2 * pi)) / (2 * log(theta))

    first, last = pair(scaling["beta_fast"]), pair(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:  # as in transformers: no division by 0
        last += 0.001
    pairs = torch.arange(len(inv_freq), device=inv_freq.device)
    slowed = ((pairs - first) / (last - first)).clamp(0, 1)
    return inv_freq / scaling["factor"] * slowed + inv_freq * (1 - slowed)


def softmax_scale(shape: ModelShape, scaling: Mapping[str, Any] | None) -> float | None:
    """Factor of scores in layers with YaRN's `scaling`; None means head_dim ** -0.5."""
    size = shape.query_pre_attn_scalar
    if scaling is None:
        return size and size**-0.5
    # Queries and keys each have the factor: scores have its square.
    factor: float = scaling["attention_factor"]
    return factor**2 * (size or shape.head_dim) ** -0.5


def rotate_own_tokens(chunk: Any, groups: Groups) -> None:
    """For dynamic context parallelism, where the number of context ranks differs per microbatch:
    make RoPE see one rank.

    Transformer Engine's attention takes the context group from a microbatch's params, but RoPE
    takes the module's group, also when a layer is recomputed in the backward of another microbatch.
    So for RoPE every rank is alone, with one sequence of its own tokens and one row of angles per
    token (cf. `PackedRotary`); a hook gives attention the real boundaries.
    """
    for module in chunk.modules():
        if isinstance(module, Attention):
            alone = copy(module.pg_collection)
            alone.cp = groups.contexts[1]
            module.pg_collection = alone
            # `PackedAttention` does not read padded lengths.
            if not isinstance(module.core_attention, PackedAttention):
                module.core_attention.register_forward_pre_hook(_set_boundaries, with_kwargs=True)


def _set_boundaries(
    _attention: Any, positional: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    params = named["packed_seq_params"]
    padded = params.attention_cu_seqlens
    own = replace(params, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded)
    return positional, named | {"packed_seq_params": own}
