"""Ways to fill slots, which have room for a number of tokens, and to assign them to data ranks.

A slot becomes a microbatch.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

EVEN = 0.002
"""Imbalance that is accepted: (most - least) work of a data rank, relative to the mean."""


@dataclass(frozen=True, kw_only=True)
class Units:
    """The units that microbatches are made of, costliest first. A unit is never split."""

    tokens: np.ndarray
    costs: np.ndarray
    room: int
    """Tokens that fit into a microbatch."""
    overhead: float
    """Fixed cost of a microbatch, in addition to its units."""


def best_fit(units: Units) -> np.ndarray:
    """The slot of each unit: longest first, into the fullest slot that still has room."""
    slots = np.zeros(len(units.tokens), dtype=int)
    free: list[tuple[int, int]] = []  # tokens and slot, ascending
    order = np.argsort(-units.tokens, kind="stable")
    for unit, tokens in zip(order.tolist(), units.tokens[order].tolist(), strict=True):
        fullest = bisect_left(free, (tokens, -1))
        left, slot = free.pop(fullest) if fullest < len(free) else (units.room, len(free))
        slots[unit] = slot
        insort(free, (left - tokens, slot))
    return slots


def fill(units: Units, targets: np.ndarray) -> np.ndarray | None:
    """The slot of each unit: costliest first, to the slot furthest below its target.

    `targets` are costs by slot. This is Graham's LPT rule, in batches: units go to the next slots
    in line until a slot that has just got one would come first again. A slot that had no room for a
    unit gets no more units, unless no other slot is left. None if a unit fits nowhere.
    """
    slots = np.empty(len(units.costs), dtype=int)
    missing, free = targets.astype(float), np.full(len(targets), units.room)
    left = np.arange(len(slots))
    while len(left):
        line = np.argsort(-missing, kind="stable")[: len(left)]
        offered = missing[line]
        if offered[0] == -np.inf:
            return _squeeze(units, left, slots, free)
        again = np.maximum.accumulate(offered - units.costs[left[: len(line)]])
        size = 1 + int(np.append(offered[1:] < again[:-1], True).argmax())
        to, batch = line[:size], left[:size]
        fits = units.tokens[batch] <= free[to]
        slots[batch] = to
        missing[to] -= units.costs[batch]
        free[to] -= np.where(fits, units.tokens[batch], 0)
        missing[to[~fits]] = -np.inf
        left = np.concatenate([batch[~fits], left[size:]])
    return slots


def fill_by_rank(units: Units, shape: tuple[int, int]) -> np.ndarray | None:
    """The slot of each unit: costliest first, to the cheapest slot of the rank with least work.

    Slower than `fill`, but balances ranks better if there is little room. None if a unit fits
    nowhere.
    """
    slots = np.empty(len(units.costs), dtype=int)
    tokens, load, rank_load = np.zeros(shape, dtype=int), np.zeros(shape), np.zeros(shape[0])
    sizes = zip(units.tokens.tolist(), units.costs.tolist(), strict=True)
    for unit, (length, cost) in enumerate(sizes):
        fits = tokens + length <= units.room
        rank = int(np.where(fits.any(axis=1), rank_load, np.inf).argmin())
        slot = int(np.where(fits[rank], load[rank], np.inf).argmin())
        if not fits[rank, slot]:
            return None
        slots[unit] = rank * shape[1] + slot
        tokens[rank, slot] += length
        load[rank, slot] += cost
        rank_load[rank] += cost
    return slots


def _squeeze(
    units: Units, left: np.ndarray, slots: np.ndarray, free: np.ndarray
) -> np.ndarray | None:
    """Put the units that are `left` each into the slot with the least sufficient room."""
    for unit in left.tolist():
        slot = int(np.where(free >= units.tokens[unit], free, np.iinfo(free.dtype).max).argmin())
        if free[slot] < units.tokens[unit]:
            return None
        slots[unit] = slot
        free[slot] -= units.tokens[unit]
    return slots


def numbered(shape: tuple[int, int]) -> np.ndarray:
    """Slots by (data rank, microbatch), numbered consecutively rank by rank."""
    return np.arange(shape[0] * shape[1]).reshape(shape)


def dealt(slots: np.ndarray, shape: tuple[int, int], units: Units) -> np.ndarray:
    """Filled slots by (data rank, microbatch): costliest first, to the rank with least work."""
    costs = np.bincount(slots, units.costs, shape[0] * shape[1])
    places, load = np.empty(shape, dtype=int), np.zeros(shape[0])
    for number, row in enumerate(np.argsort(-costs, kind="stable").reshape(shape[::-1])):
        places[np.argsort(load, kind="stable"), number] = row
        load += costs[places[:, number]]
    return places


def _some(candidates: np.ndarray) -> np.ndarray:
    """A sample of a few hundred: exchanges are searched among all pairs."""
    return candidates[:: len(candidates) // 512 + 1]


def evened(slots: np.ndarray, places: np.ndarray, units: Units) -> np.ndarray:
    """The slot of each unit after repeated exchanges between the most and the least loaded rank.

    `places` are the slots by (data rank, microbatch).
    """
    slots, num_ranks = slots.copy(), len(places)
    rank_of = np.empty(places.size, dtype=int)
    rank_of[places] = np.arange(num_ranks)[:, None]
    for _ in range(2 * num_ranks):
        load = np.bincount(rank_of[slots], units.costs, num_ranks)
        gap = load.max() - load.min()
        if gap <= EVEN * load.mean():
            break
        mine = _some(np.flatnonzero(rank_of[slots] == load.argmax()))
        others = _some(np.flatnonzero(rank_of[slots] == load.argmin()))
        free = units.room - np.bincount(slots, units.tokens, places.size)
        more = units.tokens[mine][:, None] - units.tokens[others]
        possible = (more <= free[slots[others]]) & (-more <= free[slots[mine]][:, None])
        off = abs(units.costs[mine][:, None] - units.costs[others] - gap / 2)
        off = np.where(possible, off, np.inf)
        if not off.min(initial=np.inf) < gap / 2:
            break
        i, j = np.unravel_index(off.argmin(), off.shape)
        slots[mine[i]], slots[others[j]] = slots[others[j]], slots[mine[i]]
    return slots
