"""Plans which sequences form which microbatch of which data-parallel rank, in which order."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np

from parallel.alignment import Alignment, round_up
from parallel.balance import (
    Items,
    best_fit,
    fill,
    fill_by_rank,
    rank_by_rank,
    rebalance,
    snake_assign,
)
from parallel.dims import ParallelDims
from parallel.pipeline_sim import RAMPS, candidate_orders, candidate_targets, makespan

Plan = list[list[list[int]]]
"""``plan[data rank][microbatch]``: indices of the microbatch's sequences."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Microbatches that the context ranks of a replica compute at the same time; see `turns.py`."""

    context_size: int
    microbatches: list[list[int]]
    """Sequences of each block of `context_size` neighbours; empty for an idle block."""


def fixed_turns(plan: Plan, context: int) -> list[list[Turn]]:
    """Turns [data rank][turn] in which all `context` ranks split every microbatch of `plan`."""
    return [
        [Turn(context_size=context, microbatches=[microbatch]) for microbatch in rank]
        for rank in plan
    ]


def numbered(turns: Sequence[Turn], numbers: Sequence[int]) -> list[Turn]:
    """Replace index i of each sequence by ``numbers[i]``."""
    return [
        replace(turn, microbatches=[[numbers[i] for i in each] for each in turn.microbatches])
        for turn in turns
    ]


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Compute cost of a sequence of L tokens: ``linear * L + quadratic * L**2``, in any unit.

    The default is for a transformer of hidden size 4096; only the ratios matter.
    """

    linear: float = 1.0
    quadratic: float = 1 / (12 * 4096)
    overhead: float = 256.0
    """Fixed cost of a microbatch, in tokens: kernel launches, messages, small matrices."""
    exchange: float = 0.08
    """Cost of exchanging a token's keys and values between context ranks, in tokens: 12 kB per
    layer, forward and backward, with 1,024 of each in bfloat16, at 50 GB/s, against 72 h**2 FLOP at
    400 TFLOP/s for h = 4096."""

    @classmethod
    def transformer(cls, hidden_size: int, attending: float = 1.0) -> "CostModel":
        """The usual block: 24 h**2 FLOP per token in matrices, 4 h per causal (query, key) pair.

        A sequence has L**2 / 2 such pairs in the `attending` part of the layers, so quadratic /
        linear = attending 2 h / (24 h**2) (Kaplan et al., arXiv 2001.08361, section 2.1). Other
        layers have linear attention, or none.
        """
        # Not times `attending`: context ranks exchange no less for linear attention.
        exchange = cls.exchange * (4096 / hidden_size) ** 2
        return cls(linear=1.0, quadratic=attending / (12 * hidden_size), exchange=exchange)


class ScheduledPlan(NamedTuple):
    """Items in bins, bins in the order in which ranks run them, and the time of the schedule."""

    time: float
    bins: np.ndarray
    """[items] -> bin"""
    places: np.ndarray
    """[data rank, microbatch] -> bin"""


SMALL_BUBBLE = 0.02
"""Pipeline bubble, as a fraction of the work, below which the plan ignores the pipeline."""
FEW = 600
"""Up to this many items, a slower way to fill microbatches is tried as well."""


def plan_microbatches(
    lengths: Sequence[int],
    max_tokens: int,
    dims: ParallelDims,
    alignment: Alignment,
    cost: CostModel | None = None,
    *,
    search: bool = True,
) -> Plan:
    """Assign sequences to the microbatches of data-parallel ranks.

    Returns ``plan[data rank][microbatch]`` = ascending indices into `lengths` (tokens per
    sequence). Each index occurs once; no microbatch exceeds `max_tokens`, alignment included; every
    rank has the same number of microbatches, a multiple of the pipeline size under interleaving,
    possibly with empty ones at the end. The plan depends only on the arguments, so all ranks
    compute the same one without communication. Without `search` the plan ignores the pipeline: as
    few microbatches as fit, of equal cost.

    Raises ValueError if a sequence does not fit.
    """
    aligned = -(-np.array(lengths, dtype=int) // alignment.sequence) * alignment.sequence
    capacity = microbatch_capacity(lengths, max_tokens, alignment)
    cost = cost or CostModel()
    costs = cost.linear * aligned + cost.quadratic * aligned.astype(float) ** 2
    return plan_items(aligned, costs, capacity, dims, cost.linear * cost.overhead, search=search)


def plan_items(
    tokens: np.ndarray,
    costs: np.ndarray,
    capacity: int,
    dims: ParallelDims,
    overhead: float,
    *,
    search: bool = True,
) -> Plan:
    """The plan for items with these `tokens`, each at most `capacity`, and `costs`.

    Without a pipeline: as few microbatches as best-fit-decreasing needs, of equal cost, the
    costliest first, so that running out of memory shows at once. In a pipeline, stages wait for the
    first microbatch to arrive, the last to return, and slow ones in between: there may be more
    microbatches than needed, if the gain outweighs their fixed cost, and those at the ends are
    smaller. Counts and ramps are ranked by simulating the schedule with idealised costs; bins are
    filled for the best ones, and the fastest resulting plan is taken.

    The n-th microbatches of all data ranks cost about the same, since ranks meet in collectives.
    """
    order = np.argsort(-costs, kind="stable")
    items = Items(tokens=tokens[order], costs=costs[order], capacity=capacity, overhead=overhead)
    bins = best_fit(items)
    step = dims.pipeline if dims.virtual_pipeline > 1 else 1
    used = int(bins.max(initial=-1)) + 1
    fewest = max(round_up(math.ceil(used / dims.data), step), step)
    bubble = (dims.pipeline - 1) / dims.virtual_pipeline
    if not search or bubble < SMALL_BUBBLE * fewest:
        dims = replace(dims, pipeline=1, virtual_pipeline=1)

    found = [_scheduled(bins, snake_assign(bins, (dims.data, fewest), items), items, dims)]
    if len(items.costs) <= FEW:
        filled = fill_by_rank(items, (dims.data, fewest))
        if filled is not None:
            found.append(_scheduled(filled, rank_by_rank((dims.data, fewest)), items, dims))
    for targets in candidate_targets(items, fewest, step, dims):
        filled = fill(items, targets.ravel())
        if filled is not None:
            for places in (rank_by_rank(targets.shape), snake_assign(filled, targets.shape, items)):
                found.append(_scheduled(filled, places, items, dims))
    # Among equally fast plans take the last: that of best fit, the first, is less even.
    best = min(reversed(found), key=attrgetter("time"))
    level = _scheduled(rebalance(best.bins, best.places, items), best.places, items, dims)
    best = min(best, level, key=attrgetter("time"))
    bins, places = best.bins, best.places

    # By bin, then by index: every microbatch lists its sequences in ascending order.
    by_bin = order[np.lexsort((order, bins))].tolist()
    ends = np.bincount(bins, minlength=places.size).cumsum()
    starts = [0, *ends.tolist()]
    return [[by_bin[starts[bin_] : starts[bin_ + 1]] for bin_ in rank] for rank in places.tolist()]


def microbatch_capacity(lengths: Sequence[int], max_tokens: int, alignment: Alignment) -> int:
    """Tokens that a microbatch may have; ValueError if the longest sequence does not fit."""
    capacity = max_tokens // alignment.total * alignment.total
    longest = max(range(len(lengths)), key=lengths.__getitem__, default=-1)
    needed = round_up(lengths[longest], alignment.total) if lengths else alignment.total
    if needed > capacity:
        what = f"sequence {longest} has {lengths[longest]} tokens" if lengths else "no tokens"
        raise ValueError(
            f"{what}, {needed} after alignment to a multiple of {alignment.total}, more than "
            f"max_tokens_per_microbatch = {max_tokens}: set it to {needed} or more"
        )
    return capacity


def _scheduled(
    bins: np.ndarray, places: np.ndarray, items: Items, dims: ParallelDims
) -> ScheduledPlan:
    """Put the microbatches in the fastest order found, the same for all ranks.

    Row r of `places` is first sorted by cost. An order such as [2, 0, 1] then means that every rank
    begins with its third costliest microbatch.
    """
    costs = np.bincount(bins, items.costs, places.size)[places]
    places = np.take_along_axis(places, np.argsort(-costs, axis=1, kind="stable"), axis=1)
    costs = -np.sort(-costs, axis=1)
    whole = int((costs > 0).all(axis=0).sum())  # microbatches empty on some rank come last
    costs = costs + items.overhead
    ramps = range(len(RAMPS) if dims.pipeline > 1 else 1)
    orders = [order for ramp in ramps for order in candidate_orders(whole, dims.pipeline, ramp)]
    orders = [np.append(order, np.arange(whole, costs.shape[1])) for order in orders]
    # Ranked by the mean rank; only the two orders below are timed on all ranks.
    mean = costs.mean(axis=0)
    times = makespan(
        np.array([mean[order] for order in orders]), dims.pipeline, dims.virtual_pipeline
    )
    if dims.expert > 1:  # ranks wait for each other in every layer's all-to-all
        costs = costs.max(axis=0, keepdims=True)
    fastest, descending = orders[int(times.argmin())], np.arange(costs.shape[1])
    found = [
        (float(makespan(costs[:, order], dims.pipeline, dims.virtual_pipeline).max()), order)
        for order in (fastest, descending)
    ]
    time, order = min(found, key=itemgetter(0))
    return ScheduledPlan(time, bins, places[:, order])
