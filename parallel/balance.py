"""Bin packing of sequences into microbatches, and the assignment of microbatches to data ranks."""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

EVEN = 0.002
"""Accepted imbalance of data ranks: (most work - least work) / mean."""


@dataclass(frozen=True, kw_only=True)
class Items:
    """Sequences, or completions that share a prompt, costliest first. An item is never split."""

    tokens: np.ndarray
    costs: np.ndarray
    capacity: int
    """Tokens that fit into a microbatch."""
    overhead: float
    """Fixed cost of a microbatch, in addition to its items."""


def best_fit(items: Items) -> np.ndarray:
    """The bin of each item by best-fit-decreasing: into the fullest bin that still has room."""
    bins = np.zeros(len(items.tokens), dtype=int)
    free: list[tuple[int, int]] = []  # (tokens, bin), ascending
    order = np.argsort(-items.tokens, kind="stable")
    for item, tokens in zip(order.tolist(), items.tokens[order].tolist(), strict=True):
        # `free` ascends: the first bin with room is the fullest. -1 is below all bin numbers.
        fullest = bisect_left(free, (tokens, -1))
        left, bin_ = free.pop(fullest) if fullest < len(free) else (items.capacity, len(free))
        bins[item] = bin_
        insort(free, (left - tokens, bin_))
    return bins


def fill(items: Items, targets: np.ndarray) -> np.ndarray | None:
    """The bin of each item: costliest first, to the bin furthest below its target cost.

    `targets` [bins]. Equal targets give Graham's LPT rule. Example, all with room enough:
    costs 5 4 3 2 and targets 8 6 give bins 0 1 0 1 (missing 8 6 -> 3 6 -> 3 2 -> 0 2 -> 0 0).

    A bin without room for an item gets no more of them; once all bins are out, items go wherever
    they fit (`_squeeze`). None if an item fits nowhere.
    """
    bins = np.empty(len(items.costs), dtype=int)
    missing, free = targets.astype(float), np.full(len(targets), items.capacity)
    left = np.arange(len(bins))
    while len(left):
        line = np.argsort(-missing, kind="stable")[: len(left)]
        offered = missing[line]
        if offered[0] == -np.inf:
            return _squeeze(items, left, bins, free)
        # One batch gives the next items to different bins, furthest below target first. It ends
        # where a bin that has just got its item is still further below its target than the next bin
        # in line.
        again = np.maximum.accumulate(offered - items.costs[left[: len(line)]])
        size = 1 + int(np.append(offered[1:] < again[:-1], True).argmax())
        to, batch = line[:size], left[:size]
        fits = items.tokens[batch] <= free[to]
        bins[batch] = to
        missing[to] -= items.costs[batch]
        free[to] -= np.where(fits, items.tokens[batch], 0)
        missing[to[~fits]] = -np.inf
        # Refused items go first: they are the costliest that are left.
        left = np.concatenate([batch[~fits], left[size:]])
    return bins


def fill_by_rank(items: Items, shape: tuple[int, int]) -> np.ndarray | None:
    """The bin of each item: costliest first, to the cheapest bin of the rank with least work.

    `shape` is (data ranks, microbatches). Slower than `fill`, but balances ranks better if there is
    little room. None if an item fits nowhere.
    """
    bins = np.empty(len(items.costs), dtype=int)
    tokens, load, rank_load = np.zeros(shape, dtype=int), np.zeros(shape), np.zeros(shape[0])
    sizes = zip(items.tokens.tolist(), items.costs.tolist(), strict=True)
    for item, (length, cost) in enumerate(sizes):
        fits = tokens + length <= items.capacity
        rank = int(np.where(fits.any(axis=1), rank_load, np.inf).argmin())
        bin_ = int(np.where(fits[rank], load[rank], np.inf).argmin())
        if not fits[rank, bin_]:
            return None
        bins[item] = rank * shape[1] + bin_
        tokens[rank, bin_] += length
        load[rank, bin_] += cost
        rank_load[rank] += cost
    return bins


def _squeeze(
    items: Items, left: np.ndarray, bins: np.ndarray, free: np.ndarray
) -> np.ndarray | None:
    """Put each item that is `left` into the bin with the least sufficient room."""
    for item in left.tolist():
        bin_ = int(np.where(free >= items.tokens[item], free, np.iinfo(free.dtype).max).argmin())
        if free[bin_] < items.tokens[item]:
            return None
        bins[item] = bin_
        free[bin_] -= items.tokens[item]
    return bins


def rank_by_rank(shape: tuple[int, int]) -> np.ndarray:
    """[data rank, microbatch] -> bin: the first rank gets the first bins, and so on."""
    return np.arange(shape[0] * shape[1]).reshape(shape)


def snake_assign(bins: np.ndarray, shape: tuple[int, int], items: Items) -> np.ndarray:
    """[data rank, microbatch] -> bin: in each turn every rank gets one, costliest bins first.

    The rank with least work so far gets the costliest bin of the turn, so two ranks alternate:
    bins of cost 9 8 4 1 become [9, 1] and [8, 4].
    """
    costs = np.bincount(bins, items.costs, shape[0] * shape[1])
    places, load = np.empty(shape, dtype=int), np.zeros(shape[0])
    for number, row in enumerate(np.argsort(-costs, kind="stable").reshape(shape[::-1])):
        places[np.argsort(load, kind="stable"), number] = row
        load += costs[places[:, number]]
    return places


def _some(candidates: np.ndarray) -> np.ndarray:
    """Every k-th of the candidates, at most 512: `rebalance` compares all pairs."""
    return candidates[:: len(candidates) // 512 + 1]


def rebalance(bins: np.ndarray, places: np.ndarray, items: Items) -> np.ndarray:
    """The bin of each item after exchanges between the most and the least loaded rank.

    `places` [data rank, microbatch] are bins. An exchange of two items moves cost d between the
    ranks; d = gap / 2 is best. Stops when ranks are `EVEN`, or no exchange helps.
    """
    bins, num_ranks = bins.copy(), len(places)
    rank_of = np.empty(places.size, dtype=int)
    rank_of[places] = np.arange(num_ranks)[:, None]
    for _ in range(2 * num_ranks):
        load = np.bincount(rank_of[bins], items.costs, num_ranks)
        gap = load.max() - load.min()
        if gap <= EVEN * load.mean():
            break
        mine = _some(np.flatnonzero(rank_of[bins] == load.argmax()))
        others = _some(np.flatnonzero(rank_of[bins] == load.argmin()))
        free = items.capacity - np.bincount(bins, items.tokens, places.size)
        more = items.tokens[mine][:, None] - items.tokens[others]
        possible = (more <= free[bins[others]]) & (-more <= free[bins[mine]][:, None])
        off = abs(items.costs[mine][:, None] - items.costs[others] - gap / 2)
        off = np.where(possible, off, np.inf)
        # An exchange narrows the gap if 0 < d < gap, that is |d - gap / 2| < gap / 2.
        if not off.min(initial=np.inf) < gap / 2:
            break
        i, j = np.unravel_index(off.argmin(), off.shape)
        bins[mine[i]], bins[others[j]] = bins[others[j]], bins[mine[i]]
    return bins
