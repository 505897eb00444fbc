"""Attention with shared prompts on a GPU: torch's flex attention, one kernel for all segments.

A query sees two ranges of packed positions: its own segment up to itself, and the prompt that its
segment continues. Keys are not copied, and blocks of keys that no query of a block sees are
skipped.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
"""Number of queries, and of keys, in a block: flex attention's default."""
SLAB = 64 * BLOCK
"""Queries compared with all blocks of keys at a time: tensors of 8 MB at 128k tokens."""


def block_mask(cu_seqlens: Tensor, prefixes: Tensor, queries: Tensor) -> BlockMask:
    """The mask for `queries`, packed positions [t]; keys are in packed order.

    `cu_seqlens` [n + 1] and `prefixes` [n, 2] are those of a `PackedBatch`. Built from the ranges,
    because torch's `create_block_mask` would evaluate all pairs of tokens.
    """
    segment = torch.bucketize(queries, cu_seqlens[1:], right=True)
    first = cu_seqlens[:-1].long()[segment]
    # Two tensors: the compiler does not support views of one.
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
    # For fewer than 128 queries torch 2.13 would take a decoding kernel, of which it has no tiles
    # that fit our blocks if keys have several heads (pytorch/pytorch#185349).
    attend, options = (
        (_compiled(), {"BACKEND": "TRITON"}) if query.is_cuda else (flex_attention, None)
    )
    output: Tensor = attend(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=options,
    )
    return output.squeeze(0).transpose(0, 1)


@cache
def _compiled() -> Any:
    """Dynamic shapes: few kernels for all lengths, as every microbatch has a different one.

    With and without gradients, and where there is a single block, they are compiled apart: up to
    12. Beyond its limit, 8 by default, torch would compute all pairs of tokens instead; with
    `fullgraph` that is an error.
    """
    compiler: Any = torch.compile  # torch 2.13's overloads do not tell of recompile_limit
    return compiler(flex_attention, dynamic=True, fullgraph=True, recompile_limit=64)


def _blocks_seen(ranges: Sequence[tuple[Tensor, Tensor]], starts: Tensor) -> tuple[Tensor, Tensor]:
    """Which blocks of keys each block of queries sees in part, and which entirely.

    Blocks of keys begin at `starts`; each of the t queries sees the keys [first, end) of each of
    `ranges`. Both results are bool [t / BLOCK, blocks].
    """
    some = whole = starts.new_zeros((), dtype=torch.bool)
    for first, end in ranges:
        first, end = first[:, None], end[:, None]
        some = some | ((first < starts + BLOCK) & (end > starts) & (first < end))
        whole = whole | ((first <= starts) & (end >= starts + BLOCK))
    return _by_block(some).any(dim=1), _by_block(whole).all(dim=1)


def _by_block(rows: Tensor) -> Tensor:
    """[t, key blocks] as [query blocks, BLOCK, key blocks]; False beyond the end."""
    missing = -len(rows) % BLOCK
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)).unflatten(0, (-1, BLOCK))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each block of queries, the number of key blocks set, and all indices, these first."""
    numbers = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    return blocks.sum(dim=1).int()[None, None], numbers[None, None]
