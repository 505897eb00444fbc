"""Zigzag context parallelism: which packed positions each context-parallel rank holds.

Every sequence is cut into ``2 * size`` equal chunks, and rank r holds chunks r and
``2 * size - 1 - r``: an early and a late one, so that causal attention costs the same on every
rank. Index maths only.
"""

import torch
from torch import Tensor


def context_indices(cu_seqlens: Tensor, rank: int, size: int) -> Tensor:
    """Packed positions that context rank `rank` of `size` holds, in its local order.

    `cu_seqlens` [num_sequences + 1]: cumulative lengths, each a multiple of ``2 * size`` when
    ``size > 1``. Returns int64 [T / size] on the device of `cu_seqlens`.
    """
    cu_seqlens = cu_seqlens.long()
    if size == 1:
        return torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
    lengths = cu_seqlens.diff()
    assert not (lengths % (2 * size)).any(), (
        f"lengths {lengths.tolist()} are not multiples of 2 * {size}"
    )
    chunks = lengths // (2 * size)
    early = cu_seqlens[:-1] + rank * chunks
    late = cu_seqlens[:-1] + (2 * size - 1 - rank) * chunks
    return _ranges(torch.stack([early, late], dim=1).flatten(), chunks.repeat_interleave(2))


def context_order(cu_seqlens: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Packed positions in the order of all ranks' concatenated slices, and the inverse.

    The inverse restores packed order:
    ``torch.cat([x[context_indices(cu_seqlens, r, size)] for r in range(size)])[inverse]`` is ``x``.
    Both int64 [T].
    """
    order = torch.cat([context_indices(cu_seqlens, rank, size) for rank in range(size)])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return order, inverse


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Concatenate ``arange(start, start + length)`` over all pairs, without a loop."""
    offsets = starts - (lengths.cumsum(0) - lengths)
    repeated = offsets.repeat_interleave(lengths)
    return repeated + torch.arange(repeated.numel(), device=starts.device)
