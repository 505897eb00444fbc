"""Means over whole sequences whose tokens are packed and split over context-parallel ranks."""

from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def counted_lengths(cu_seqlens: Tensor, positions: Tensor) -> Tensor:
    """Number of ascending `positions` [K] in each packed sequence: [n], of `cu_seqlens` [n + 1]."""
    return torch.searchsorted(positions, cu_seqlens.to(positions)).diff()


class SequenceMeans:
    """Sums and means over the counted tokens of each sequence of one packed microbatch.

    Packing never cuts a sequence. Under context parallelism its tokens are spread over the ranks of
    a group, which all make the same calls in the same order.
    """

    def __init__(self, lengths: Tensor, context_group: dist.ProcessGroup | None) -> None:
        """`lengths` [n]: the number of tokens of each sequence that count on this rank, K in all.
        Each token counts on exactly one rank of `context_group` (None for one rank)."""
        self.lengths, self._group = lengths, context_group

    def sum(self, values: Tensor) -> Tensor:
        """For each token [K] the sum of `values` [K] over the counted tokens of its sequence.

        Differentiable; the backward pass also sums over the context ranks.
        """
        return self._at_tokens(self._over_ranks(self.local_sums(values)), len(values))

    def mean(self, values: Tensor) -> Tensor:
        """For each token [K] the mean of `values` [K] over the counted tokens of its sequence."""
        totals = self._over_ranks(self.local_sums(values))
        return self._at_tokens(totals / self._counts.to(totals.dtype), len(values))

    def local_sums(self, values: Tensor) -> Tensor:
        """The sums [n] of `values` [K] over this rank's tokens of each sequence."""
        return _sums(values, self.lengths)

    @cached_property
    def _counts(self) -> Tensor:
        """[n] number of tokens, at least 1: a mean over no tokens is never used."""
        return self._over_ranks(self.lengths.double()).clamp(min=1)

    def _at_tokens(self, totals: Tensor, num_tokens: int) -> Tensor:
        repeated: Tensor = _Repeat.apply(totals, self.lengths, num_tokens)
        return repeated

    def _over_ranks(self, totals: Tensor) -> Tensor:
        if self._group is None or dist.get_world_size(self._group) == 1:
            return totals
        summed: Tensor = _SumOverRanks.apply(totals, self._group)
        return summed


def _sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums over each sequence; differentiable."""
    # Not index_add, which adds in no fixed order on a GPU: ranks that hold the same tokens must
    # agree on which sequence is clipped.
    totals = torch.segment_reduce(values.double(), "sum", lengths=lengths, unsafe=True)
    return totals.to(values.dtype)


class _Repeat(torch.autograd.Function):
    """Repeat each value for the tokens of its sequence; torch's own backward uses index_add."""

    @staticmethod
    def forward(ctx: Any, totals: Tensor, lengths: Tensor, num_tokens: int) -> Tensor:
        ctx.lengths = lengths
        # Without a size, the host would wait for a GPU to add up the lengths.
        return totals.repeat_interleave(lengths, output_size=num_tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _sums(gradients[0].contiguous(), ctx.lengths), None, None


class _SumOverRanks(torch.autograd.Function):
    """All-reduce in both directions: every rank's loss depends on the sum, and losses add up."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None
