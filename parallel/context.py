"""Zigzag context parallelism: which packed positions each context-parallel rank holds.

Every sequence is cut into ``2 * size`` equal chunks, and rank r holds chunks r and
``2 * size - 1 - r``: an early and a late one, so that causal attention costs the same on every
rank. Index maths only.
"""

import torch
from torch import Tensor


def context_indices(
    cu_seqlens: Tensor, rank: int, size: int, num_tokens: int | None = None
) -> Tensor:
    """Packed positions that context rank `rank` of `size` holds, in its local order.

    `cu_seqlens` [num_sequences + 1]: cumulative lengths, each a multiple of ``2 * size`` when
    ``size > 1``. `num_tokens` is the last of them, T; None reads it, for which the host waits if
    they are on a GPU. Returns int64 [T / size] on the device of `cu_seqlens`.
    """
    num_tokens = int(cu_seqlens[-1]) if num_tokens is None else num_tokens
    if size == 1:
        return torch.arange(num_tokens, device=cu_seqlens.device)
    cu_seqlens = cu_seqlens.long()
    chunks = cu_seqlens.diff() // (2 * size)
    early = cu_seqlens[:-1] + rank * chunks
    late = cu_seqlens[:-1] + (2 * size - 1 - rank) * chunks
    starts = torch.stack([early, late], dim=1).flatten()
    return _ranges(starts, chunks.repeat_interleave(2), num_tokens // size)


def context_order(
    cu_seqlens: Tensor, size: int, num_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Packed positions in the order of all ranks' concatenated slices, and the inverse.

    The inverse restores packed order:
    ``torch.cat([x[context_indices(cu_seqlens, r, size)] for r in range(size)])[inverse]`` is ``x``.
    Both int64 [T]. `num_tokens` as for `context_indices`.
    """
    order = torch.cat([context_indices(cu_seqlens, rank, size, num_tokens) for rank in range(size)])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return order, inverse


def _ranges(starts: Tensor, lengths: Tensor, total: int) -> Tensor:
    """Concatenate ``arange(start, start + length)`` over all pairs, `total` numbers in all."""
    offsets = starts - (lengths.cumsum(0) - lengths)
    repeated = offsets.repeat_interleave(lengths, output_size=total)
    return repeated + torch.arange(total, device=starts.device)
