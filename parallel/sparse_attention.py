"""Sparse attention over packed sequences (DeepSeek-V3.2, arXiv 2512.02556, section 2.1).

An indexer chooses a few tokens for each query, from its sequence up to itself; attention sees no
others. Scores are computed for one block of queries at a time, and attention again in the backward:
no tensor has a number for each pair of tokens. Keys are complete and in packed order, as in
`attention.py`. Queries may be of any rank: each has its packed position, so its scores do not
depend on where it is computed, but for the order of sums.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

BLOCK = 128
"""Number of queries of attention at a time."""
INDEX_BLOCK = 32
"""Number of queries of the indexer at a time. It has a score per head: 1 GB at 128k tokens."""


@dataclass(frozen=True)
class Queries:
    """The positions of queries in a packed microbatch."""

    places: Tensor
    """int64 [2, t]: packed positions of the start of each query's sequence, and of the query."""
    places_on_host: Tensor
    """`places` on the host, so that `blocks` does not wait for the device."""

    @classmethod
    def of(cls, positions: Tensor, cu_seqlens: Tensor) -> "Queries":
        """The queries at packed `positions` [t]; `cu_seqlens` [n + 1] as in a `PackedBatch`."""
        sequence = torch.bucketize(positions, cu_seqlens[1:], right=True)
        places = torch.stack([cu_seqlens.long()[sequence], positions])
        return cls(places, places.cpu())

    def part(self, rank: int, size: int) -> "Queries":
        return Queries(
            *(each.chunk(size, dim=1)[rank] for each in (self.places, self.places_on_host))
        )

    @property
    def offsets(self) -> Tensor:
        """[t] position of each query in its sequence."""
        return self.places[1] - self.places[0]

    def blocks(self, size: int) -> Iterator[tuple[slice, slice]]:
        """Blocks of `size` queries, each with the range of keys that any of them sees."""
        for row in range(0, self.places.shape[1], size):
            first, last = self.places_on_host[:, row : row + size]
            yield slice(row, row + size), slice(int(first.min()), int(last.max()) + 1)


@torch.no_grad()
def choose_tokens(
    query: Tensor, key: Tensor, weights: Tensor, queries: Queries, topk: int
) -> Tensor:
    """Packed positions, int32 [t, topk], of the tokens with the largest scores.

    The score of token s for t is sum_h weights[t, h] relu(query[t, h] . key[s]) (equation 1), of
    `query` [t, heads, d], `key` [T, d] and `weights` [t, heads]. Among equal scores, earlier tokens
    come first. A query that sees fewer than `topk` tokens repeats its own position.
    """
    chosen = queries.places[1].int()[:, None].repeat(1, topk)
    for rows, keys in queries.blocks(INDEX_BLOCK):
        first, last = queries.places[:, rows, None]
        scores = _scores(query[rows], key[keys], weights[rows])
        positions = torch.arange(keys.start, keys.stop, device=scores.device)
        scores = scores.masked_fill((positions < first) | (positions > last), -torch.inf)
        # Not `topk`, which breaks ties in any order: relu makes many scores equal, namely zero.
        best = scores.sort(dim=1, descending=True, stable=True)
        number = min(topk, len(positions))
        is_seen = best.values[:, :number] > -torch.inf
        found = (best.indices[:, :number] + keys.start).int()
        chosen[rows, :number] = torch.where(is_seen, found, chosen[rows, :number])
    return chosen


def recorded_tokens(recorded: Tensor, queries: Queries) -> Tensor:
    """Packed positions, int32 [t, topk], of `recorded` [t, topk], positions in queries' sequences.

    A query that sees at most `topk` tokens gets all of them, whatever is recorded.
    """
    first, offsets = queries.places[0].int()[:, None], queries.offsets.int()[:, None]
    topk = recorded.shape[1]
    every = torch.arange(topk, dtype=torch.int32, device=recorded.device)
    return first + torch.where(offsets < topk, torch.minimum(every, offsets), recorded)


def _scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Scores [queries, keys], summed over heads."""
    # In a function: scores of single heads are freed on return, before those of the next block.
    by_head = (query @ key.T).relu_()
    return (weights.unsqueeze(1) @ by_head).squeeze(1)


def sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, queries: Queries, scale: float
) -> Tensor:
    """Attention of `query` [t, heads, d] to the `chosen` [t, topk] of `key` [T, heads, d] and
    `value` [T, heads, value size]; returns [t, heads, value size]."""
    output: Tensor = _SparseAttention.apply(query, key, value, chosen, queries, scale)
    return output


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        chosen: Tensor,
        queries: Queries,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, chosen)
        ctx.queries, ctx.scale = queries, scale
        blocks = [
            _attend(query[rows], key[keys], value[keys], chosen[rows] - keys.start, scale)
            for rows, keys in queries.blocks(BLOCK)
        ]
        return torch.cat(blocks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, chosen = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)  # a sum over all blocks
        sums = [torch.zeros_like(each, dtype=wide) for each in (key, value)]
        of_queries = []
        for rows, keys in ctx.queries.blocks(BLOCK):
            # Chosen positions, relative to the block's keys.
            block = query[rows], key[keys], value[keys], chosen[rows] - keys.start
            # Views: `_add_gradients` adds to `sums`.
            sums_of_block = [total[keys] for total in sums]
            of_queries.append(_add_gradients(block, ctx.scale, grad[rows], sums_of_block))
        of_key, of_value = (total.to(key.dtype) for total in sums)
        return torch.cat(of_queries), of_key, of_value, None, None, None


def _add_gradients(
    block: tuple[Tensor, Tensor, Tensor, Tensor], scale: float, grad: Tensor, sums: list[Tensor]
) -> Tensor:
    """Return the gradient of a block's queries; add gradients of its keys and values to `sums`."""
    *inputs, chosen = block
    q, k, v = (each.detach().requires_grad_() for each in inputs)
    with torch.enable_grad():
        output = _attend(q, k, v, chosen, scale)
    of_query, *others = torch.autograd.grad(output, (q, k, v), grad)
    for total, part in zip(sums, others, strict=True):
        total += part
    return of_query


def _attend(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, scale: float) -> Tensor:
    """Attention of a block of queries to the `chosen` [queries, topk] of its keys."""
    # A mask counts positions once that `choose_tokens` repeats.
    sees = torch.zeros(len(query), len(key), dtype=torch.bool, device=query.device)
    sees.scatter_(1, chosen.long(), True)
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    output = scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale)
    return output.squeeze(0).transpose(0, 1)
