"""RoPE (arXiv 2104.09864): its angles, their scaling, and the rows of a packed microbatch.

YaRN (arXiv 2309.00071) slows RoPE's rotations, and multiplies queries and keys by an attention
factor. Megatron-Core multiplies cosines and sines by it, but its fused RoPE of packed sequences
takes only angles, and drops the factor without a word (`test_upstream.py`: mscale). Here the factor
is part of the softmax scale, which every attention takes: torch's, Transformer Engine's and flex.
Scores are equal where whole heads are rotated; of latents the factor is one for both parts of a
head.
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

    Megatron's own caches a table for each of the last 32 lengths, but lengths rarely repeat.
    `windowed` is the RoPE of layers with a window, if it is another: then there are two tables, for
    `WindowedAttention`. `axes` say for each frequency whether it rotates by a token's position in
    time, height or width: M-RoPE of prompts with images.
    """

    def __init__(self, rotary: Any, windowed: Any = None, axes: Sequence[int] = ()) -> None:
        super().__init__()
        self.rotary, self.windowed = rotary, windowed
        # Each frequency is there twice, for both halves of a head.
        self._axes = torch.tensor([*axes, *axes], device=rotary.inv_freq.device)
        self._table: Tensor | None = None  # as long as the longest sequence so far

    def get_rotary_seq_len(
        self, context: Any, decoder: Any, hidden: Any, config: Any, params: PackedParams
    ) -> PackedParams:
        """Return the argument for `forward`: the whole params instead of a length."""
        return params

    def forward(self, params: PackedParams, **_: Any) -> Tensor:
        """The rows of a microbatch: [T or longest sequence, 1, 1, rotary_dim], of two tables
        [2, ...].
        """
        length = params.rope_length
        if self._table is None or self._table.shape[-4] < length:
            self._table = self.rotary.get_emb(length)
            if self.windowed is not None:
                self._table = torch.stack([self._table, self.windowed.get_emb(length)])
        if params.rope_positions is None:
            # Not all rows: given T rows, Megatron would read one per token, ignoring positions.
            return self._table[..., :length, :, :, :]
        rows = self._table[..., params.rope_positions, :, :, :]
        if params.rope_positions.dim() == 1:
            return rows
        by_time, by_height, by_width = rows
        of_image = torch.where(self._axes == 1, by_height, by_width)
        return torch.where(self._axes == 0, by_time, of_image)


def packed_rotary(shape: ModelShape, axes: Sequence[int]) -> PackedRotary | None:
    """RoPE of a model's chunks, None for a model without; `axes` are those of M-RoPE."""
    if not shape.rotary_dim:
        return None
    windowed = None
    if shape.window_rope_theta is not None:
        windowed = _rotary(replace(shape, rope_theta=shape.window_rope_theta, rope_scaling=None))
    return PackedRotary(_rotary(shape), windowed, axes)


def _rotary(shape: ModelShape) -> RotaryEmbedding:
    """RoPE's angles, for the part of each head that it rotates."""
    rotary = RotaryEmbedding(
        shape.rotary_dim,
        rotary_percent=1.0,
        rotary_base=shape.rope_theta,
        **_rope_scaling(shape),
    )
    if yarn := yarn_scaling(shape):
        rotary.inv_freq = yarn_frequencies(rotary.inv_freq, shape.rope_theta, yarn)
    return rotary


def _rope_scaling(shape: ModelShape) -> dict[str, Any]:
    """RotaryEmbedding's arguments for the kinds of RoPE scaling that it computes itself."""
    if shape.rope_scaling is None or yarn_scaling(shape):
        return {}
    factor = shape.rope_scaling["factor"]
    if shape.rope_scaling["rope_type"] == "linear":
        return {"seq_len_interpolation_factor": factor}
    assert shape.rope_scaling["rope_type"] == "llama3", "read_shape refuses other kinds"
    return {"rope_scaling": True, "rope_scaling_factor": factor}


def yarn_scaling(shape: ModelShape) -> Mapping[str, Any] | None:
    """The model's `rope_scaling`, if it is YaRN's."""
    scaling = shape.rope_scaling
    return scaling if scaling is not None and scaling["rope_type"] == "yarn" else None


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


def softmax_scale(shape: ModelShape, scaling: Mapping[str, Any] | None) -> float | None:
    """Factor of scores in layers with this scaling by YaRN; None: head_dim ** -0.5."""
    size = shape.query_pre_attn_scalar
    if scaling is None:
        return size and size**-0.5
    factor: float = scaling["attention_factor"]
    return factor**2 * (size or shape.head_dim) ** -0.5


def rotate_own_tokens(chunk: Any, groups: Groups) -> None:
    """Let a chunk's layers split each microbatch over another number of context ranks.

    Transformer Engine's attention takes the ranks of a microbatch from its params. RoPE does not:
    its ranks are those of the module, also when a layer is recomputed during the backward of
    another microbatch. So RoPE is told that every rank is alone, with one sequence of its own
    tokens and the angles of each (cf. `PackedRotary`), and attention is told the boundaries apart.
    """
    for module in chunk.modules():
        if isinstance(module, Attention):
            alone = copy(module.pg_collection)
            alone.cp = groups.contexts[1]
            module.pg_collection = alone
            if not isinstance(module.core_attention, PackedAttention):  # which needs no padded ones
                module.core_attention.register_forward_pre_hook(_tell_boundaries, with_kwargs=True)


def _tell_boundaries(
    _attention: Any, positional: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    params = named["packed_seq_params"]
    padded = params.attention_cu_seqlens
    own = replace(params, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded)
    return positional, named | {"packed_seq_params": own}
