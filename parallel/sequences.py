"""Means over whole sequences whose tokens are packed, and split over context-parallel ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SequenceMeans:
    """The sequences of one packed microbatch, each as the tokens of it that count.

    Packing never cuts a sequence, so all of it is in this microbatch; under context parallelism its
    tokens are spread over the ranks of a group, which all make the same calls in the same order.
    """

    def __init__(
        self, cu_seqlens: Tensor, mask: Tensor, context_group: dist.ProcessGroup | None
    ) -> None:
        """`cu_seqlens` [n + 1] are the packed boundaries, `mask` [T] the tokens of this rank that
        count: over the ranks of `context_group` (None for one rank) each token once."""
        positions = torch.arange(len(mask), device=mask.device)
        self._sequence = torch.bucketize(positions, cu_seqlens[1:], right=True)
        self._lengths = cu_seqlens.diff().long()
        self._mask, self._group = mask, context_group
        # At least 1: the mean over no token is 0, and nothing reads it.
        self._counts = self._over_sequences(mask.double()).clamp(min=1)

    def sum(self, values: Tensor) -> Tensor:
        """For each token [T] the sum of `values` [T] over the counted tokens of its sequence.

        Differentiable: the gradient crosses the context ranks as the sum does.
        """
        return self._over_sequences(values)[self._sequence]

    def mean(self, values: Tensor) -> Tensor:
        """The same for the mean."""
        totals = self._over_sequences(values)
        return (totals / self._counts.to(totals.dtype))[self._sequence]

    def _over_sequences(self, values: Tensor) -> Tensor:
        # Not index_add, which on a GPU adds in another order every time: ranks that hold the same
        # tokens must agree on which sequence is clipped.
        counted = values.where(self._mask, 0.0).double()
        totals = torch.segment_reduce(counted, "sum", lengths=self._lengths, unsafe=True)
        totals = totals.to(values.dtype)
        if self._group is None or dist.get_world_size(self._group) == 1:
            return totals
        summed: Tensor = _SumOverRanks.apply(totals, self._group)
        return summed


class _SumOverRanks(torch.autograd.Function):
    """Every rank's loss depends on the sum, and the loss is the sum of theirs: both ways a sum."""

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
