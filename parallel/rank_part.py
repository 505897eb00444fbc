"""Part of one rank in a packed microbatch: its inputs and its predictions. Index maths only.

Zigzag context parallelism cuts every sequence into ``2 * size`` equal chunks, and rank r holds
chunks r and ``2 * size - 1 - r``: an early and a late one, so that causal attention costs the same
on every rank. Only this file knows that ``tokens[t]`` is predicted at position t - 1 of its
sequence.
"""

from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor


def context_indices(
    cu_seqlens: Tensor, rank: int, size: int, num_tokens: int | None = None
) -> Tensor:
    """Packed positions that context rank `rank` of `size` holds, in its local order.

    `cu_seqlens` [num_sequences + 1]: cumulative lengths, each a multiple of ``2 * size`` when
    ``size > 1``. `num_tokens` is the last of them, T; with None the host reads it, and waits for a
    GPU. Returns int64 [T / size] on the device of `cu_seqlens`.
    """
    num_tokens = int(cu_seqlens[-1]) if num_tokens is None else num_tokens
    if size == 1:
        return torch.arange(num_tokens, device=cu_seqlens.device)
    cu_seqlens = cu_seqlens.long()
    chunks = cu_seqlens.diff() // (2 * size)
    early = cu_seqlens[:-1] + rank * chunks
    late = cu_seqlens[:-1] + (2 * size - 1 - rank) * chunks
    starts = torch.stack([early, late], dim=1).flatten()
    lengths = chunks.repeat_interleave(2)
    # Concatenate arange(start, start + length) over all pairs.
    offsets = starts - (lengths.cumsum(0) - lengths)
    repeated = offsets.repeat_interleave(lengths, output_size=num_tokens // size)
    return repeated + torch.arange(num_tokens // size, device=starts.device)


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


def prediction_targets(cu_seqlens: Tensor, local: Tensor) -> Tensor:
    """Packed position of the token that each local position predicts; -1 at the end of a sequence.

    `cu_seqlens` [n + 1] are the packed sequence boundaries, `local` [T / cp] the packed positions
    that this context rank holds, in its own order (`context_indices`). Returns int64 [T / cp].
    """
    following = local + 1
    return following.masked_fill(torch.isin(following, cu_seqlens[1:].to(following)), -1)


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Positions of a context rank that predict the K selected tokens.

    K depends on values: on a GPU, the host would wait for all earlier work to read it. So indices
    are computed on the host, and copied.
    """

    rows: Tensor
    """[K] int64, ascending: positions in the order of the context rank. A row that predicts several
    second tokens is repeated."""
    positions: Tensor
    """[K] int64: packed positions of the predicted tokens, ascending but for second tokens."""
    num_rows: int
    """T / cp, number of positions that the context rank holds."""
    counts: list[int]
    """Number of `rows` in the equal part of each tensor rank under sequence parallelism."""

    @classmethod
    def of(
        cls, targets: Tensor, select: Tensor, num_parts: int = 1, rows: Tensor | None = None
    ) -> "Predictions":
        """Predictions of tokens in `select` [T] bool; `prediction_targets` gives `targets`.

        `rows`: the row of each target, ascending and none left out; None: each row has one target.
        """
        rows = torch.arange(len(targets)).to(targets) if rows is None else rows
        # A target of -1 selects the last token, which the first condition then drops.
        wanted = (targets >= 0) & select[targets]
        num_rows, chosen = int(rows[-1]) + 1, rows[wanted]
        return cls(
            rows=chosen,
            positions=targets[wanted],
            num_rows=num_rows,
            counts=(chosen // ceil(num_rows / num_parts)).bincount(minlength=num_parts).tolist(),
        )

    def to(self, device: torch.device | str) -> "Predictions":
        return replace(self, rows=self.rows.to(device), positions=self.positions.to(device))


@dataclass(frozen=True, kw_only=True)
class SecondTokens:
    """Targets of a layer for multi-token prediction: the tokens after the next ones."""

    next: Tensor
    """[T / cp] int64, packed positions of the next tokens, inputs of the layer; any position at the
    end of a sequence."""
    predictions: Predictions
    """Predictions of tokens of the loss."""

    @classmethod
    def of(
        cls,
        cu_seqlens: Tensor,
        select: Tensor,
        local: Tensor,
        num_parts: int,
        prefixes: Tensor | None,
    ) -> "SecondTokens":
        """Second tokens for `local`, positions of the rank; `prefixes` as in a `PackedBatch`, other
        arguments as in `RankPart.of`.

        Segments may continue another one. Completions 5 6 and 7 of a prompt 1 2 3 are packed as
        1 2 | 3 5 6 | 3 7: after token 2 comes 3, and then 5 as well as 7.
        """
        following = prediction_targets(cu_seqlens, local)
        # `prediction_targets` of -1 (no next token) gives 0, a valid position: mask it.
        second = prediction_targets(cu_seqlens, following).masked_fill(following < 0, -1)
        rows = torch.arange(len(local)).to(local)
        if prefixes is not None:
            firsts, ends = prefixes.unbind(-1)
            row_before = local.new_full((len(select) + 1,), -1)
            row_before[local + 1] = rows
            # Of the last token before each segment: 0, the end of no range, has none.
            before = row_before[ends.where(firsts < ends, 0).amax(1)]
            starts, before = cu_seqlens[:-1][before >= 0].long(), before[before >= 0]
            following[before] = starts
            second = torch.cat([second, prediction_targets(cu_seqlens, starts)])
            rows, order = torch.cat([rows, before]).sort(stable=True)
            second = second[order]
        predictions = Predictions.of(second, select, num_parts, rows)
        return cls(next=following.relu(), predictions=predictions)

    def to(self, device: torch.device | str) -> "SecondTokens":
        return SecondTokens(next=self.next.to(device), predictions=self.predictions.to(device))


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """Indices of a rank for all passes over a microbatch, forwards and backwards.

    Made once, on the host, before anything is copied to a GPU: a forward then never waits for a
    GPU.
    """

    local: Tensor
    """[T / cp] int64, packed positions that the context rank holds, in its order."""
    predictions: Predictions
    """Predictions of tokens of the loss; read on the last pipeline stage."""
    second: SecondTokens | None = None
    """None: no layer predicts second tokens."""

    @classmethod
    def of(
        cls, cu_seqlens: Tensor, select: Tensor, rank: int, size: int, num_parts: int
    ) -> "RankPart":
        """Part of context rank `rank` of `size`.

        Args:
            cu_seqlens: [n + 1], cumulative lengths of the packed segments.
            select: [T] bool, the tokens of the loss.
            rank: the place among the context ranks that split the microbatch.
            size: their number.
            num_parts: the number of tensor ranks.
        """
        lengths = cu_seqlens.diff()
        assert size == 1 or not (lengths % (2 * size)).any(), (
            f"lengths {lengths.tolist()} are not multiples of 2 * {size}"
        )
        local = context_indices(cu_seqlens, rank, size, len(select))
        targets = prediction_targets(cu_seqlens, local)
        return cls(local=local, predictions=Predictions.of(targets, select, num_parts))

    def to(self, device: torch.device | str) -> "RankPart":
        second = self.second and self.second.to(device)
        predictions = self.predictions.to(device)
        return RankPart(local=self.local.to(device), predictions=predictions, second=second)
