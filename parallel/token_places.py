"""Columns of a microbatch, from what is known of its sequences."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor


class TokenPlaces:
    """Where sequences lie in a microbatch of `total` tokens: in ascending order."""

    def __init__(self, places: Sequence[slice], total: int) -> None:
        self._places, self._total = places, total
        bounds = [0, *(bound for place in places for bound in (place.start, place.stop)), total]
        self._lengths = np.diff(bounds)
        """Of what lies before, in and between the places, and behind the last."""

    def column(
        self,
        values: Sequence[float | Tensor],
        dtype: DTypeLike = np.float32,
        elsewhere: int = 0,
    ) -> Tensor:
        """[total]: at each place its value, a scalar or one per token; `elsewhere` in between."""
        if Tensor not in map(type, values):  # nearly always
            in_turn = np.full(len(self._lengths), elsewhere, dtype)
            in_turn[1::2] = values
            # Faster than to write to a slice for each.
            return torch.from_numpy(np.repeat(in_turn, self._lengths))
        column = np.full(self._total, elsewhere, dtype)
        for value, place in zip(values, self._places, strict=True):
            column[place] = value
        return torch.from_numpy(column)
