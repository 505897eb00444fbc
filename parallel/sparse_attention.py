"""Sparse attention over packed sequences (DeepSeek-V3.2, arXiv 2512.02556, section 2.1).

An indexer chooses a few tokens for each query, from its sequence up to itself; attention sees no
others. Scores are computed for one block of queries at a time, and attention again in the backward:
no tensor has a number for each pair of tokens. Keys are complete and in packed order, as in
`attention.py`. Queries may be of any rank: each has its packed position, so its scores do not
depend on where it is computed, but for the order of sums.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

BLOCK = 128
"""Number of queries of attention at a time."""
INDEX_BLOCK = 32
"""Number of queries of the indexer at a time. It has a score per head: 1 GB at 128k tokens."""


@dataclass(frozen=True)
class Keys:
    """Packed positions of the keys that a block of queries sees."""

    parts: list[slice]
    """Disjoint and ascending."""

    @classmethod
    def of(cls, ranges: Iterable[list[int]]) -> "Keys":
        """The union of packed `ranges`, [first, end) each."""
        parts: list[slice] = []
        for first, end in sorted(ranges):
            if parts and first <= parts[-1].stop:
                parts[-1] = slice(parts[-1].start, max(end, parts[-1].stop))
            elif first < end:
                parts.append(slice(first, end))
        return cls(parts)

    def positions(self, device: torch.device) -> Tensor:
        return torch.cat([torch.arange(p.start, p.stop, device=device) for p in self.parts])

    def take_from(self, packed: Tensor) -> Tensor:
        """The keys' part of a packed tensor, a view if they are one range."""
        views = [packed[part] for part in self.parts]
        return views[0] if len(views) == 1 else torch.cat(views)

    def add_to(self, packed: Tensor, own: Tensor) -> None:
        """Add `own`, indexed like the keys, to a packed tensor."""
        sizes = [part.stop - part.start for part in self.parts]
        for part, values in zip(self.parts, own.split(sizes), strict=True):
            packed[part].add_(values)

    def places(self, positions: Tensor) -> Tensor:
        """Places among the keys of packed `positions`."""
        places = positions - self.parts[0].start
        for before, part in pairwise(self.parts):
            places -= (positions >= part.start) * (part.start - before.stop)
        return places


@dataclass(frozen=True, eq=False)
class Queries:
    """Queries of a packed microbatch: each sees its sequence up to itself."""

    ranges: Tensor
    """int64 [t, n, 2]: packed ranges [first, end), in the order of the sequence: those that the
    query's segment continues, (0, 0) for none, and last the segment up to the query."""
    ranges_on_host: Tensor
    """`ranges` on the host, so that `blocks` does not wait for the device."""
    _parts: dict[tuple[int, int], "Queries"] = field(default_factory=dict)
    """Results of `part`, for all layers."""
    _blocks: dict[int, list[tuple[slice, Keys]]] = field(default_factory=dict)
    """Results of `blocks`, for all layers: 0.1 s for the indexer at 32k tokens."""

    @classmethod
    def of(cls, positions: Tensor, cu_seqlens: Tensor, prefixes: Tensor | None = None) -> "Queries":
        """The queries at packed `positions` [t]; the others as in a `PackedBatch`."""
        segment = torch.bucketize(positions, cu_seqlens[1:], right=True)
        own = torch.stack([cu_seqlens.long()[segment], positions + 1], dim=1).unsqueeze(1)
        ranges = own if prefixes is None else torch.cat([prefixes[segment], own], dim=1)
        return cls(ranges, ranges.cpu())

    def part(self, rank: int, size: int) -> "Queries":
        if (rank, size) not in self._parts:
            own, on_host = (each.chunk(size)[rank] for each in (self.ranges, self.ranges_on_host))
            self._parts[rank, size] = Queries(own, on_host)
        return self._parts[rank, size]

    @property
    def positions(self) -> Tensor:
        """[t] packed position of each query."""
        return self.ranges[:, -1, 1] - 1

    @property
    def lengths(self) -> Tensor:
        """[t, n] number of tokens in each of the `ranges`."""
        return self.ranges[..., 1] - self.ranges[..., 0]

    @property
    def offsets(self) -> Tensor:
        """[t] position of each query in its sequence."""
        return self.lengths.sum(dim=1) - 1

    def blocks(self, size: int) -> list[tuple[slice, Keys]]:
        """Blocks of `size` queries, each with the keys that any of them sees."""
        if size not in self._blocks:
            self._blocks[size] = [*self._divided(size)]
        return self._blocks[size]

    def _divided(self, size: int) -> Iterator[tuple[slice, Keys]]:
        for row in range(0, len(self.ranges), size):
            seen = self.ranges_on_host[row : row + size]
            own = [int(seen[:, -1, 0].min()), int(seen[:, -1, 1].max())]
            continued = seen[:, :-1].flatten(0, 1).unique(dim=0).tolist()
            yield slice(row, row + size), Keys.of([*continued, own])


@torch.no_grad()
def choose_tokens(
    query: Tensor, key: Tensor, weights: Tensor, queries: Queries, topk: int
) -> Tensor:
    """Packed positions, int32 [t, topk], of the tokens with the largest scores.

    The score of token s for t is sum_h weights[t, h] relu(query[t, h] . key[s]) (equation 1), of
    `query` [t, heads, d], `key` [T, d] and `weights` [t, heads]. Among equal scores, earlier tokens
    come first. A query that sees fewer than `topk` tokens repeats its own position.
    """
    chosen = queries.positions.int()[:, None].repeat(1, topk)
    for rows, keys in queries.blocks(INDEX_BLOCK):
        scores = _scores(query[rows], keys.take_from(key), weights[rows])
        positions = keys.positions(scores.device)
        first, end = queries.ranges[rows, :, :, None].unbind(2)
        sees = ((positions >= first) & (positions < end)).any(dim=1)
        scores = scores.masked_fill(~sees, -torch.inf)
        # Not `topk`, which breaks ties in any order: relu makes many scores equal, namely zero.
        best = scores.sort(dim=1, descending=True, stable=True)
        number = min(topk, len(positions))
        is_seen = best.values[:, :number] > -torch.inf
        found = positions[best.indices[:, :number]].int()
        chosen[rows, :number] = torch.where(is_seen, found, chosen[rows, :number])
    return chosen


def recorded_tokens(recorded: Tensor, queries: Queries) -> Tensor:
    """Packed positions, int32 [t, topk], of `recorded` [t, topk], positions in queries' sequences.

    A query that sees at most `topk` tokens gets all of them, whatever is recorded.
    """
    offsets, topk = queries.offsets.int()[:, None], recorded.shape[1]
    every = torch.arange(topk, dtype=torch.int32, device=recorded.device)
    in_sequence = torch.where(offsets < topk, torch.minimum(every, offsets), recorded)
    # In turn: of ranges that begin at the same position of the sequence, the last is not empty.
    starts, lengths = queries.ranges[..., 0].int(), queries.lengths.int()
    begins, packed = lengths.cumsum(1, dtype=torch.int32) - lengths, in_sequence
    for start, begin in zip(starts.split(1, dim=1), begins.split(1, dim=1), strict=True):
        packed = torch.where(in_sequence >= begin, in_sequence - begin + start, packed)
    return packed


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
            _attend(
                query[rows],
                keys.take_from(key),
                keys.take_from(value),
                keys.places(chosen[rows]),
                scale,
            )
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
            of_query = _add_gradients(
                (query[rows], keys.take_from(key), keys.take_from(value)),
                keys.places(chosen[rows]),
                ctx.scale,
                grad[rows],
                keys,
                sums,
            )
            of_queries.append(of_query)
        of_key, of_value = (total.to(key.dtype) for total in sums)
        return torch.cat(of_queries), of_key, of_value, None, None, None


def _add_gradients(
    block: tuple[Tensor, Tensor, Tensor],
    chosen: Tensor,
    scale: float,
    grad: Tensor,
    keys: Keys,
    sums: list[Tensor],
) -> Tensor:
    """Return the gradient of a block's queries; add gradients of its keys and values to `sums`."""
    q, k, v = (each.detach().requires_grad_() for each in block)
    with torch.enable_grad():
        output = _attend(q, k, v, chosen, scale)
    of_query, *others = torch.autograd.grad(output, (q, k, v), grad)
    for total, part in zip(sums, others, strict=True):
        keys.add_to(total, part)
    return of_query


def _attend(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, scale: float) -> Tensor:
    """Attention of a block of queries to the `chosen` [queries, topk] of its keys."""
    # A mask counts positions once that `choose_tokens` repeats.
    sees = torch.zeros(len(query), len(key), dtype=torch.bool, device=query.device)
    sees.scatter_(1, chosen.long(), True)
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    output = scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale)
    return output.squeeze(0).transpose(0, 1)
