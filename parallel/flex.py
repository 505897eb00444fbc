"""Attention with shared prompts on a GPU: one kernel for all segments, by torch's flex attention.

A query sees two ranges of packed positions: its own segment up to itself, and the prompt that its
segment continues. No key is copied, and blocks of keys that no query of a block sees are skipped.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
"""Queries, and keys, of a block: flex attention's default."""
SLAB = 64 * BLOCK
"""Queries that are compared with all blocks of keys at a time: 8 MB a tensor at 128k tokens."""


def block_mask(cu_seqlens: Tensor, prefixes: Tensor, queries: Tensor) -> BlockMask:
    """Which keys each of `queries` sees, packed positions [t]; keys are in packed order.

    `cu_seqlens` [n + 1] and `prefixes` [n, 2] are those of a `PackedBatch`. Made from the ranges,
    as torch's own `create_block_mask` would go through all pairs of tokens.
    """
    segment = torch.bucketize(queries, cu_seqlens[1:], right=True)
    first = cu_seqlens[:-1].long()[segment]
    # Two tensors: views of one the compiler does not take.
    prefix_first, prefix_end = prefixes[:, 0][segment], prefixes[:, 1][segment]

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_own = (key >= first[query]) & (key <= queries[query])
        return is_own | ((key >= prefix_first[query]) & (key < prefix_end[query]))

    total = int(cu_seqlens[-1])
    starts = torch.arange(0, total, BLOCK, device=queries.device)
    slabs = [
        _blocks_seen([(own_first, own_end), (shared_first, shared_end)], starts)
        for own_first, own_end, shared_first, shared_end in zip(
            *(bound.split(SLAB) for bound in (first, queries + 1, prefix_first, prefix_end)),
            strict=True,
        )
    ]
    some, whole = (torch.cat(parts) for parts in zip(*slabs, strict=True))
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(len(queries), total),
    )


def flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """Attention of `query` [t, heads, d] to `key` and `value` [T, kv heads, d] under `mask`."""
    attend = _compiled() if query.is_cuda else flex_attention
    output: Tensor = attend(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.squeeze(0).transpose(0, 1)


@cache
def _compiled() -> Any:
    """One kernel for all lengths: every microbatch has another."""
    return torch.compile(flex_attention, dynamic=True)


def _blocks_seen(ranges: Sequence[tuple[Tensor, Tensor]], starts: Tensor) -> tuple[Tensor, Tensor]:
    """Of which blocks of keys, that begin at `starts`, each block of queries sees some, and all.

    A query, one of t, sees the keys [first, end) of each of `ranges`. Both [t / BLOCK, blocks].
    """
    some = whole = starts.new_zeros((), dtype=torch.bool)
    for first, end in ranges:
        first, end = first[:, None], end[:, None]
        some = some | ((first < starts + BLOCK) & (end > starts) & (first < end))
        whole = whole | ((first <= starts) & (end >= starts + BLOCK))
    return _by_block(some).any(dim=1), _by_block(whole).all(dim=1)


def _by_block(rows: Tensor) -> Tensor:
    """[t, blocks of keys] as [blocks of queries, BLOCK, blocks of keys]; False beyond the end."""
    missing = -len(rows) % BLOCK
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)).unflatten(0, (-1, BLOCK))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys are set for each of queries, and their numbers first."""
    numbers = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    return blocks.sum(dim=1).int()[None, None], numbers[None, None]
