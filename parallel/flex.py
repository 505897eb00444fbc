"""Attention with shared prompts on a GPU: one kernel for all segments, by torch's flex attention.

A query sees two ranges of packed positions: its own segment up to itself, and the prompt that its
segment continues. No key is copied, and blocks of keys that no query of a block sees are skipped.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
"""Queries, and keys, of a block: flex attention's default."""


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
    ends = starts + BLOCK
    own = _meet(first, queries + 1, starts, ends), _cover(first, queries + 1, starts, ends)
    shared = (
        _meet(prefix_first, prefix_end, starts, ends),
        _cover(prefix_first, prefix_end, starts, ends),
    )
    some = _by_block(own[0] | shared[0]).any(dim=1)
    whole = _by_block(own[1] | shared[1]).all(dim=1)
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


def _meet(first: Tensor, end: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Whether each range [first, end) has a part of each block: [t, blocks]."""
    return (first[:, None] < ends) & (end[:, None] > starts) & (first < end)[:, None]


def _cover(first: Tensor, end: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Whether it has all of it."""
    return (first[:, None] <= starts) & (end[:, None] >= ends)


def _by_block(rows: Tensor) -> Tensor:
    """[t, blocks of keys] as [blocks of queries, BLOCK, blocks of keys]; False beyond the end."""
    missing = -len(rows) % BLOCK
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)).unflatten(0, (-1, BLOCK))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys are set for each of queries, and their numbers first."""
    numbers = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    return blocks.sum(dim=1).int()[None, None], numbers[None, None]
