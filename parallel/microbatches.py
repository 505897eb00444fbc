"""Plans which sequences form which microbatch of which data-parallel rank, in which order."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from parallel.alignment import Alignment, round_up
from parallel.balance import Units, best_fit, dealt, evened, fill, fill_by_rank, numbered
from parallel.dims import ParallelDims
from parallel.pipeline_sim import RAMPS, makespan, promising, run_orders

Plan = list[list[list[int]]]
"""``plan[data rank][microbatch]``: the indices of its sequences."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Compute cost of a sequence of L tokens: ``linear * L + quadratic * L**2``, in any unit.

    The default is for a transformer of hidden size 4096; only the ratios matter.
    """

    linear: float = 1.0
    quadratic: float = 1 / (12 * 4096)
    overhead: float = 256.0
    """Fixed cost of a microbatch, in tokens: kernel launches, messages, small matrices."""

    @classmethod
    def transformer(cls, hidden_size: int) -> "CostModel":
        """The usual block: 24 h**2 FLOP per token in matrices, 4 h per causal (query, key) pair.

        A sequence has L**2 / 2 such pairs, so quadratic / linear = 2 h / (24 h**2) (Kaplan et
        al., arXiv 2001.08361, section 2.1).
        """
        return cls(linear=1.0, quadratic=1 / (12 * hidden_size))


class Arranged(NamedTuple):
    """A plan, and how long it takes."""

    time: float
    slots: np.ndarray
    """The slot of each unit."""
    places: np.ndarray
    """[data rank, microbatch]: the slot that becomes this microbatch."""


SMALL_BUBBLE = 0.02
"""Pipeline bubble, as a fraction of the work, below which the plan ignores the pipeline."""
FEW = 600
"""Up to this many units, a slower way to fill microbatches is tried as well."""


def plan_microbatches(
    lengths: Sequence[int],
    max_tokens: int,
    dims: ParallelDims,
    alignment: Alignment,
    cost: CostModel | None = None,
) -> Plan:
    """Which sequences form which microbatch of which data-parallel rank.

    Returns ``plan[data rank][microbatch]`` = ascending indices into `lengths` (tokens per
    sequence). Each index occurs once; no microbatch exceeds `max_tokens`, alignment included; every
    rank has the same number of microbatches, a multiple of the pipeline size under interleaving,
    possibly with empty ones at the end. The plan depends only on the arguments, so all ranks
    compute the same one without communication.

    Raises ValueError if a sequence does not fit.
    """
    aligned = -(-np.array(lengths, dtype=int) // alignment.sequence) * alignment.sequence
    room = room_for(lengths, max_tokens, alignment)
    cost = cost or CostModel()
    costs = cost.linear * aligned + cost.quadratic * aligned.astype(float) ** 2
    return plan_units(aligned, costs, room, dims, overhead=cost.linear * cost.overhead)


def plan_units(
    tokens: np.ndarray, costs: np.ndarray, room: int, dims: ParallelDims, overhead: float
) -> Plan:
    """The plan for units with these `tokens`, each at most `room`, and `costs`.

    Without a pipeline: as few microbatches as best-fit-decreasing needs, of equal cost, the
    costliest first, so that running out of memory shows at once. In a pipeline, stages wait for the
    first microbatch to arrive and the last to return, and for microbatches that take longer than
    others. So there may be more microbatches than needed, as long as their fixed cost does not
    outweigh the gain, and those at the ends are smaller. Counts and ramps are ranked by the
    schedule's time with idealized costs; units are dealt out for the best ones, and the fastest
    resulting plan is taken.

    The n-th microbatches of all data ranks cost about the same, since ranks meet in collectives.
    """
    order = np.argsort(-costs, kind="stable")
    units = Units(tokens=tokens[order], costs=costs[order], room=room, overhead=overhead)
    bins = best_fit(units)
    step = dims.pipeline if dims.virtual_pipeline > 1 else 1
    used = int(bins.max(initial=-1)) + 1
    fewest = max(round_up(math.ceil(used / dims.data), step), step)
    if (dims.pipeline - 1) / dims.virtual_pipeline < SMALL_BUBBLE * fewest:
        dims = replace(dims, pipeline=1, virtual_pipeline=1)

    found = [_arranged(bins, dealt(bins, (dims.data, fewest), units), units, dims)]
    if len(units.costs) <= FEW:
        slots = fill_by_rank(units, (dims.data, fewest))
        if slots is not None:
            found.append(_arranged(slots, numbered((dims.data, fewest)), units, dims))
    for targets in promising(units, fewest, step, dims):
        slots = fill(units, targets.ravel())
        if slots is not None:
            for places in (numbered(targets.shape), dealt(slots, targets.shape, units)):
                found.append(_arranged(slots, places, units, dims))
    # Prefer later ones among equals: the plans of best fit are less even.
    best = min(reversed(found), key=lambda arranged: arranged.time)
    level = _arranged(evened(best.slots, best.places, units), best.places, units, dims)
    best = min(best, level, key=lambda arranged: arranged.time)
    slots, places = best.slots, best.places

    by_slot = order[np.lexsort((order, slots))].tolist()
    ends = np.bincount(slots, minlength=places.size).cumsum()
    starts = [0, *ends.tolist()]
    return [[by_slot[starts[slot] : starts[slot + 1]] for slot in rank] for rank in places.tolist()]


def room_for(lengths: Sequence[int], max_tokens: int, alignment: Alignment) -> int:
    """Tokens that a microbatch may have; ValueError if the longest sequence does not fit."""
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


def _arranged(slots: np.ndarray, places: np.ndarray, units: Units, dims: ParallelDims) -> Arranged:
    """Put the microbatches in the fastest order found, the same for all ranks."""
    costs = np.bincount(slots, units.costs, places.size)[places]
    places = np.take_along_axis(places, np.argsort(-costs, axis=1, kind="stable"), axis=1)
    costs = -np.sort(-costs, axis=1)
    whole = int((costs > 0).all(axis=0).sum())  # microbatches empty on some rank come last
    costs = costs + units.overhead
    ramps = range(len(RAMPS) if dims.pipeline > 1 else 1)
    orders = [order for ramp in ramps for order in run_orders(whole, dims.pipeline, ramp)]
    orders = [np.append(order, np.arange(whole, costs.shape[1])) for order in orders]
    mean = costs.mean(axis=0)
    times = makespan(
        np.array([mean[order] for order in orders]), dims.pipeline, dims.virtual_pipeline
    )
    if dims.expert > 1:  # ranks meet in every layer
        costs = costs.max(axis=0, keepdims=True)
    descending = np.arange(costs.shape[1])
    time, order = min(
        (
            (makespan(costs[:, order], dims.pipeline, dims.virtual_pipeline).max(), order)
            for order in (orders[int(times.argmin())], descending)
        ),
        key=lambda timed: timed[0],
    )
    return Arranged(float(time), slots, places[:, order])
