"""Columns of a packed microbatch: one value for each of its tokens."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor


class ColumnMap:
    """Columns [total] of a microbatch, with values at ascending `places` and a filler in the gaps.

    For places 0:2 and 4:7 of 8 tokens, `column([3, 5])` is 3 3 0 0 5 5 5 0.
    """

    def __init__(self, places: Sequence[slice], total: int) -> None:
        self._places, self._total = places, total
        bounds = [0, *(bound for place in places for bound in (place.start, place.stop)), total]
        self._lengths = np.diff(bounds)
        """Gap, place, gap, place, ..., gap: above 0 2 2 3 1."""

    def column(
        self,
        values: Sequence[float | Tensor],
        dtype: DTypeLike = np.float32,
        elsewhere: int = 0,
    ) -> Tensor:
        """One of `values` for each place, a scalar or one per token; `elsewhere` in the gaps."""
        if Tensor not in map(type, values):  # nearly always
            in_turn = np.full(len(self._lengths), elsewhere, dtype)
            in_turn[1::2] = values
            # Faster than to write to a slice for each.
            return torch.from_numpy(np.repeat(in_turn, self._lengths))
        column = np.full(self._total, elsewhere, dtype)
        for value, place in zip(values, self._places, strict=True):
            column[place] = value
        return torch.from_numpy(column)
