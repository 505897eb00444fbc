"""The factors of rows, and of columns of words, in a checksum."""

from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from parallel.layout import Shape

WORD_BYTES = 8


@lru_cache(maxsize=256)
def factors_of(shape: Shape, per_word: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The factors of a tensor's rows, in its dimensions but the last, and of its word columns."""
    num_rows, num_columns = prod(shape[:-1]), -(-shape[-1] // per_word)
    rows = _random(2 * torch.arange(num_rows, device=device)) | 1
    columns = _random(2 * torch.arange(num_columns, device=device) + 1) & ~1
    if device.type == "cuda":  # the cached tensors are used on other streams as well
        torch.cuda.current_stream(device).synchronize()
    return rows.view(shape[:-1]), columns


def _random(indices: Tensor) -> Tensor:
    """Pseudo-random int64 numbers, the same on every machine: the finalizer of SplitMix64.

    With arithmetic shifts instead of logical ones, which torch lacks.
    """
    x = (indices + 1) * -0x61C8864680B583EB
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)
