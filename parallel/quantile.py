"""The exact quantile of numbers that are distributed over ranks."""

import math

import torch
import torch.distributed as dist
from torch import Tensor


def quantile(values: Tensor, q: float, group: dist.ProcessGroup) -> float:
    """The `q`-quantile of the numbers of all ranks of `group`, interpolated like torch.quantile.

    `values` [n] are finite, and become float32; n may differ between ranks, and be 0. Returns -inf
    if no rank has a number. Every rank holds all numbers for a moment.
    """
    counts = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=values.device)
    dist.all_gather_single(counts, counts.new_tensor([len(values)]), group=group)
    total, most = int(counts.sum()), int(counts.max())
    if not total:
        return -math.inf
    padded = values.new_full((most,), math.inf, dtype=torch.float32)  # as the collective needs
    padded[: len(values)] = values
    gathered = padded.new_empty(len(counts) * most)
    dist.all_gather_single(gathered, padded, group=group)
    ordered = gathered.sort().values  # the padding comes last
    position = q * (total - 1)
    low, high = (float(ordered[place]) for place in (math.floor(position), math.ceil(position)))
    return low + (position - math.floor(position)) * (high - low)
