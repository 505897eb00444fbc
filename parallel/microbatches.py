"""Which sequences form which microbatch of which data-parallel rank, and in which order."""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from parallel.alignment import Alignment, round_up
from parallel.dims import ParallelDims
from parallel.pipeline_schedule import ABSENT, makespan

Plan = list[list[list[int]]]
"""``plan[data rank][microbatch]``: the indices of its sequences."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Compute cost of a sequence of L tokens: ``linear * L + quadratic * L**2``, in any unit.

    The default is a transformer of hidden size 4096; only the ratios matter.
    """

    linear: float = 1.0
    quadratic: float = 1 / (12 * 4096)
    overhead: float = 256.0
    """What a microbatch costs beside its sequences, in tokens: launches, messages, small matrices.
    """

    @classmethod
    def transformer(cls, hidden_size: int) -> "CostModel":
        """The usual block: 24 h**2 FLOP per token in matrices, 4 h per causal (query, key) pair.

        A sequence has L**2 / 2 such pairs, so quadratic / linear = 2 h / (24 h**2) (Kaplan et
        al., arXiv 2001.08361, section 2.1).
        """
        return cls(linear=1.0, quadratic=1 / (12 * hidden_size))


@dataclass(frozen=True, kw_only=True)
class Units:
    """What microbatches are made of, costliest first: what of it must stay together is one unit."""

    tokens: np.ndarray
    costs: np.ndarray
    room: int
    """Tokens that a microbatch takes."""
    overhead: float
    """Cost of a microbatch beside that of its units."""


class Arranged(NamedTuple):
    """A plan, and how long it takes."""

    time: float
    slots: np.ndarray
    """Of each unit."""
    places: np.ndarray
    """[data rank, microbatch]: the slot that it is."""


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """How the cost of microbatches rises at the start of the schedule and falls at its end.

    `first` and `last` are the costs at the ends, as parts of that in the middle; `rise` and `fall`
    are how many microbatches, in pipeline sizes, are cheaper than it.
    """

    first: float = 1.0
    rise: float = 0.0
    last: float = 1.0
    fall: float = 0.0

    def weights(self, microbatches: int, pipeline: int) -> np.ndarray:
        """Cost of each microbatch, as a part of that in the middle."""
        place = np.arange(microbatches)
        weights = np.ones(microbatches)
        for end, length, distance in (
            (self.first, self.rise, place),
            (self.last, self.fall, place[::-1]),
        ):
            if length > 0:
                slope = (1 - end) / max(round(length * pipeline), 1)
                weights = np.minimum(weights, end + slope * distance)
        return weights


RAMPS = [
    Ramp(),
    Ramp(first=0.6, rise=0.25, last=0.75, fall=0.5),
    Ramp(first=0.4, rise=0.5, last=0.6, fall=0.75),
    Ramp(first=0.3, rise=0.75, last=0.6, fall=0.75),
    Ramp(first=0.3, rise=1.0, last=0.45, fall=1.0),
    Ramp(first=0.3, rise=1.0, last=0.3, fall=2.0),
    Ramp(last=0.45, fall=2.0),
]
"""Near the best for 2 to 16 stages, by the number of microbatches: the fewer, the shorter.

Found on a grid of them with `makespan`; the last is for interleaved stages.
"""
CENTRES = (0.0, 0.3, 0.5, 0.7, 1.0)
"""Around which place, of all, the costliest of equally high microbatches are put."""
NUM_COUNTS = 12
"""Of numbers of microbatches that are tried, at most."""
OPERATIONS = 20_000
"""Of the schedules with these numbers of microbatches: what is large is tried with fewer numbers.
"""
SMALL_BUBBLE = 0.02
"""As a part of the work: below it the schedule is not looked at, and microbatches are as without a
pipeline."""
FEW = 600
"""Units that a slower way to fill microbatches is tried for."""
EVEN = 0.002
"""Difference between the most and the least work of data ranks, of their mean, that is let be."""
MOST_FILLED = 10
"""Of targets that units are dealt out to, the promising ones."""
PLACEMENTS = 20_000
"""Units that are put into microbatches, over all that is tried: planning takes no longer."""


def plan_microbatches(
    lengths: Sequence[int],
    max_tokens: int,
    dims: ParallelDims,
    alignment: Alignment,
    cost: CostModel | None = None,
) -> Plan:
    """Which sequences form which microbatch of which data-parallel rank.

    Returns ``plan[data rank][microbatch]`` = ascending indices into `lengths` (tokens per
    sequence). Each index occurs once; no microbatch exceeds `max_tokens`, alignment included;
    every rank has the same number of microbatches, a multiple of the pipeline size under
    interleaving, possibly with empty ones at the end. A function of its arguments alone, so that
    all ranks agree on it without talking.

    Raises ValueError when one sequence does not fit.
    """
    aligned = -(-np.array(lengths, dtype=int) // alignment.sequence) * alignment.sequence
    room = room_for(lengths, max_tokens, alignment)
    cost = cost or CostModel()
    costs = cost.linear * aligned + cost.quadratic * aligned.astype(float) ** 2
    return plan_units(aligned, costs, room, dims, overhead=cost.linear * cost.overhead)


def plan_units(
    tokens: np.ndarray, costs: np.ndarray, room: int, dims: ParallelDims, overhead: float
) -> Plan:
    """The plan for units of so many `tokens` and such `costs`, none over `room`.

    Without a pipeline, as few microbatches as best-fit-decreasing needs, of equal cost, the
    costliest first: running out of memory shows at once. In a pipeline stages wait for the first
    microbatch to come through and for the last to return, and for those that are longer than
    others. So there may be more microbatches than needed, until what each costs beside its
    sequences outweighs that; and those at the ends are smaller. Numbers and ramps are compared by
    the time that the schedule takes over costs as they could be at best; of the best ones units are
    dealt out, and of these plans the quickest is taken.

    The n-th microbatches of all data ranks cost about the same, for ranks that meet in collectives.
    """
    order = np.argsort(-costs, kind="stable")
    units = Units(tokens=tokens[order], costs=costs[order], room=room, overhead=overhead)
    bins = _best_fit(units)
    step = dims.pipeline if dims.virtual_pipeline > 1 else 1
    used = int(bins.max(initial=-1)) + 1
    fewest = max(round_up(math.ceil(used / dims.data), step), step)
    if (dims.pipeline - 1) / dims.virtual_pipeline < SMALL_BUBBLE * fewest:
        dims = replace(dims, pipeline=1, virtual_pipeline=1)

    found = [_arranged(bins, _dealt(bins, (dims.data, fewest), units), units, dims)]
    if len(units.costs) <= FEW:
        slots = _fill_by_rank(units, (dims.data, fewest))
        if slots is not None:
            found.append(_arranged(slots, _numbered((dims.data, fewest)), units, dims))
    for targets in _promising(units, fewest, step, dims):
        slots = _fill(units, targets.ravel())
        if slots is not None:
            for places in (_numbered(targets.shape), _dealt(slots, targets.shape, units)):
                found.append(_arranged(slots, places, units, dims))
    # The last of equals: those of best fit are less level.
    best = min(reversed(found), key=lambda arranged: arranged.time)
    evened = _arranged(_evened(best, units), best.places, units, dims)
    best = min(best, evened, key=lambda arranged: arranged.time)
    slots, places = best.slots, best.places

    by_slot = order[np.lexsort((order, slots))].tolist()
    ends = np.bincount(slots, minlength=places.size).cumsum()
    starts = [0, *ends.tolist()]
    return [[by_slot[starts[slot] : starts[slot + 1]] for slot in rank] for rank in places.tolist()]


def room_for(lengths: Sequence[int], max_tokens: int, alignment: Alignment) -> int:
    """Tokens that a microbatch may have; ValueError where the longest sequence does not fit."""
    room = max_tokens // alignment.total * alignment.total
    longest = max(range(len(lengths)), key=lambda i: lengths[i], default=-1)
    needed = round_up(lengths[longest], alignment.total) if lengths else alignment.total
    if needed > room:
        what = f"sequence {longest} has {lengths[longest]} tokens" if lengths else "no sequence"
        raise ValueError(
            f"{what}, {needed} after alignment to a multiple of {alignment.total}, and a "
            f"microbatch takes max_tokens_per_microbatch = {max_tokens}: set it to {needed} or more"
        )
    return room


def _best_fit(units: Units) -> np.ndarray:
    """The slot of each unit: longest first, into the fullest that still takes it."""
    slots = np.zeros(len(units.tokens), dtype=int)
    free: list[tuple[int, int]] = []  # tokens and slot, ascending
    order = np.argsort(-units.tokens, kind="stable")
    for unit, tokens in zip(order.tolist(), units.tokens[order].tolist(), strict=True):
        fullest = bisect_left(free, (tokens, -1))
        left, slot = free.pop(fullest) if fullest < len(free) else (units.room, len(free))
        slots[unit] = slot
        insort(free, (left - tokens, slot))
    return slots


def _fill(units: Units, targets: np.ndarray) -> np.ndarray | None:
    """The slot of each unit: costliest first, to where most is missing to the target.

    `targets` are costs by slot. This is Graham's LPT rule, in batches: units go to the next slots
    in line as long as none that has just got one would be before them again. A slot without room
    for a unit is left alone from then on, until no other is left. None when a unit fits nowhere.
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


def _fill_by_rank(units: Units, shape: tuple[int, int]) -> np.ndarray | None:
    """The slot of each unit: costliest first, to the rank with least, there to the cheapest slot.

    Slower than `_fill`, and evener over ranks where there is little room. None when a unit fits
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
    """What is `left` of the units, each to the slot with least room for it."""
    for unit in left.tolist():
        slot = int(np.where(free >= units.tokens[unit], free, np.iinfo(free.dtype).max).argmin())
        if free[slot] < units.tokens[unit]:
            return None
        slots[unit] = slot
        free[slot] -= units.tokens[unit]
    return slots


def _promising(units: Units, fewest: int, step: int, dims: ParallelDims) -> list[np.ndarray]:
    """Costs [data rank, microbatch] to aim at, each rank's descending; the best guess first."""
    per_rank = units.costs.sum() / dims.data
    counts = _counts(units, fewest, step, dims)
    ramps = range(len(RAMPS) if dims.pipeline > 1 else 1)
    shapes = [(count, ramp) for count in counts for ramp in ramps]
    weights = np.zeros((len(shapes), counts[-1]))
    for row, (count, ramp) in zip(weights, shapes, strict=True):
        row[:count] = -np.sort(-RAMPS[ramp].weights(count, dims.pipeline))
    held = _largest(units, counts[-1], dims.data)
    mean = _levelled(weights, held.mean(axis=0) * (weights > 0), per_rank, units)
    rows, shape_of = [], []
    for i, (count, ramp) in enumerate(shapes):
        for order in _orders(count, dims.pipeline, ramp):
            row = np.full(counts[-1], ABSENT)
            row[:count] = mean[i, :count][order] + units.overhead
            rows.append(row)
            shape_of.append(i)
    times = np.full(len(shapes), np.inf)
    np.minimum.at(times, shape_of, makespan(np.array(rows), *_stages(dims)))
    num = min(max(PLACEMENTS // max(len(units.costs), 1), 1), MOST_FILLED)
    targets = []
    for i in np.argsort(times, kind="stable")[:num].tolist():
        count = shapes[i][0]
        of_ranks = np.tile(weights[i, :count], (dims.data, 1))
        targets.append(_levelled(of_ranks, held[:, :count], per_rank, units))
    return targets


def _counts(units: Units, fewest: int, step: int, dims: ParallelDims) -> list[int]:
    """Numbers of microbatches to try, ascending.

    With k equal ones of a rank's work W, each with overhead o, the schedule takes
    (W / k + o) (k + (p - 1) / v): least at k = sqrt(W (p - 1) / (v o)). Ramps need fewer.
    """
    fill_and_drain = (dims.pipeline - 1) / dims.virtual_pipeline
    work = units.costs.sum() / dims.data
    most = math.ceil(len(units.costs) / dims.data)
    if units.overhead > 0:
        most = min(most, math.ceil(math.sqrt(work * fill_and_drain / units.overhead)))
    most = max(most // step * step, fewest)
    operations = 2 * fewest * dims.pipeline * dims.virtual_pipeline
    num = min(NUM_COUNTS, max(OPERATIONS // operations, 1), (most - fewest) // step + 1)
    spread = np.geomspace(fewest, most, num)
    return sorted({int(count) for count in np.round(spread / step) * step})


def _largest(units: Units, count: int, ranks: int) -> np.ndarray:
    """Cost of the largest unit in each of `count` microbatches of each rank, descending."""
    largest = np.zeros(count * ranks)
    num = min(len(largest), len(units.costs))
    largest[:num] = units.costs[:num]
    by_rank, load = np.empty((ranks, count)), np.zeros(ranks)
    for place, row in enumerate(largest.reshape(count, ranks)):
        by_rank[np.argsort(load, kind="stable"), place] = row
        load += by_rank[:, place]
    return by_rank


def _levelled(weights: np.ndarray, least: np.ndarray, per_rank: float, units: Units) -> np.ndarray:
    """Costs in proportion to each row of `weights`, none below its `least`, that add up to a
    rank's work.

    Where they can: none is raised beyond what a microbatch takes of the average unit.
    """
    full = units.room * units.costs.sum() / max(units.tokens.sum(), 1)
    low, high = np.zeros(len(weights)), np.full(len(weights), full / weights[weights > 0].min())
    for _ in range(40):
        level = (low + high) / 2
        levelled = np.maximum(np.minimum(level[:, None] * weights, full), least)
        short = levelled.sum(axis=1) < per_rank
        low, high = np.where(short, level, low), np.where(short, high, level)
    return np.maximum(np.minimum(high[:, None] * weights, full), least)


@lru_cache(maxsize=256)
def _orders(count: int, pipeline: int, ramp: int) -> list[np.ndarray]:
    """Ways to run microbatches that are sorted by cost, the costliest first: which comes when.

    The heavier a place in the ramp, the costlier its microbatch.
    """
    weights = RAMPS[ramp].weights(count, pipeline)
    places = np.arange(count)
    orders = {
        np.lexsort((abs(places - centre * (count - 1)), -weights)).argsort().tobytes()
        for centre in (CENTRES if pipeline > 1 else CENTRES[:1])
    }
    return [np.frombuffer(order, dtype=int) for order in sorted(orders)]


def _numbered(shape: tuple[int, int]) -> np.ndarray:
    """Slots by (data rank, microbatch), where each rank has the next ones."""
    return np.arange(shape[0] * shape[1]).reshape(shape)


def _dealt(slots: np.ndarray, shape: tuple[int, int], units: Units) -> np.ndarray:
    """Filled slots by (data rank, microbatch): costliest first, each to the rank with least."""
    costs = np.bincount(slots, units.costs, shape[0] * shape[1])
    places, load = np.empty(shape, dtype=int), np.zeros(shape[0])
    for number, row in enumerate(np.argsort(-costs, kind="stable").reshape(shape[::-1])):
        places[np.argsort(load, kind="stable"), number] = row
        load += costs[places[:, number]]
    return places


def _arranged(slots: np.ndarray, places: np.ndarray, units: Units, dims: ParallelDims) -> Arranged:
    """The quickest order of the microbatches, which is one for all ranks."""
    costs = np.bincount(slots, units.costs, places.size)[places]
    places = np.take_along_axis(places, np.argsort(-costs, axis=1, kind="stable"), axis=1)
    costs = -np.sort(-costs, axis=1)
    whole = int((costs > 0).all(axis=0).sum())  # what is empty on some rank comes last
    costs = costs + units.overhead
    ramps = range(len(RAMPS) if dims.pipeline > 1 else 1)
    orders = [order for ramp in ramps for order in _orders(whole, dims.pipeline, ramp)]
    orders = [np.append(order, np.arange(whole, costs.shape[1])) for order in orders]
    mean = costs.mean(axis=0)
    times = makespan(np.array([mean[order] for order in orders]), *_stages(dims))
    if dims.expert > 1:  # ranks meet in every layer
        costs = costs.max(axis=0, keepdims=True)
    descending = np.arange(costs.shape[1])
    time, order = min(
        (
            (makespan(costs[:, order], *_stages(dims)).max(), order)
            for order in (orders[int(times.argmin())], descending)
        ),
        key=lambda timed: timed[0],
    )
    return Arranged(float(time), slots, places[:, order])


def _some(candidates: np.ndarray) -> np.ndarray:
    """Some hundreds of them: exchanges are looked for among all pairs."""
    return candidates[:: len(candidates) // 512 + 1]


def _evened(plan: Arranged, units: Units) -> np.ndarray:
    """Slots after the rank with most work has exchanged units with the one with least, often."""
    slots, num_ranks = plan.slots.copy(), len(plan.places)
    rank_of = np.empty(plan.places.size, dtype=int)
    rank_of[plan.places] = np.arange(num_ranks)[:, None]
    for _ in range(2 * num_ranks):
        load = np.bincount(rank_of[slots], units.costs, num_ranks)
        gap = load.max() - load.min()
        if gap <= EVEN * load.mean():
            break
        mine = _some(np.flatnonzero(rank_of[slots] == load.argmax()))
        others = _some(np.flatnonzero(rank_of[slots] == load.argmin()))
        free = units.room - np.bincount(slots, units.tokens, plan.places.size)
        more = units.tokens[mine][:, None] - units.tokens[others]
        possible = (more <= free[slots[others]]) & (-more <= free[slots[mine]][:, None])
        off = abs(units.costs[mine][:, None] - units.costs[others] - gap / 2)
        off = np.where(possible, off, np.inf)
        if not off.min(initial=np.inf) < gap / 2:
            break
        i, j = np.unravel_index(off.argmin(), off.shape)
        slots[mine[i]], slots[others[j]] = slots[others[j]], slots[mine[i]]
    return slots


def _stages(dims: ParallelDims) -> tuple[int, int]:
    return dims.pipeline, dims.virtual_pipeline
