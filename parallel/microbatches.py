"""Which sequences form which microbatch of which data-parallel rank."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parallel.dims import ParallelDims
from parallel.packing import Alignment, round_up

Plan = list[list[list[int]]]
"""``plan[data rank][microbatch]``: the indices of its sequences."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Compute cost of a sequence of L tokens: ``linear * L + quadratic * L**2``, in any unit.

    The default is a transformer of hidden size 4096; only the ratio of the two matters.
    """

    linear: float = 1.0
    quadratic: float = 1 / (12 * 4096)

    @classmethod
    def transformer(cls, hidden_size: int) -> "CostModel":
        """The usual block: 24 h**2 FLOP per token in matrices, 4 h per causal (query, key) pair.

        A sequence has L**2 / 2 such pairs, so quadratic / linear = 2 h / (24 h**2) (Kaplan et
        al., arXiv 2001.08361, section 2.1).
        """
        return cls(linear=1.0, quadratic=1 / (12 * hidden_size))


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

    The number of microbatches is the one best-fit-decreasing needs. Within it, sequences are dealt
    by descending cost, each to the cheapest rank that has room and there to the cheapest microbatch
    (Graham's LPT rule, twice); where that cannot meet the token limit, best fit itself stands and
    its microbatches are dealt to the ranks. Each rank runs its costliest microbatch first: peers
    that meet in a collective then do equal work, and running out of memory shows at once.

    Raises ValueError when one sequence does not fit.
    """
    aligned = np.array([round_up(length, alignment.sequence) for length in lengths], dtype=int)
    room = max_tokens // alignment.total * alignment.total
    _check_fit(lengths, aligned, max_tokens, room, alignment)
    cost = cost or CostModel()
    costs = cost.linear * aligned + cost.quadratic * aligned.astype(float) ** 2
    order = np.argsort(-aligned, kind="stable")

    bins = _best_fit(aligned, order, room)
    interleave = dims.pipeline if dims.virtual_pipeline > 1 else 1
    num_microbatches = max(round_up(math.ceil(len(bins) / dims.data), interleave), interleave)
    plan = _level(aligned, costs, order, room, (dims.data, num_microbatches))
    if plan is None:
        plan = _deal(bins, costs, (dims.data, num_microbatches))
    return [
        sorted((sorted(members) for members in rank), key=lambda members: -costs[members].sum())
        for rank in plan
    ]


def _check_fit(
    lengths: Sequence[int], aligned: np.ndarray, max_tokens: int, room: int, alignment: Alignment
) -> None:
    longest = int(aligned.argmax()) if len(aligned) else -1
    needed = round_up(int(aligned[longest]), alignment.total) if lengths else alignment.total
    if needed > room:
        what = f"sequence {longest} has {lengths[longest]} tokens" if lengths else "no sequence"
        raise ValueError(
            f"{what}, {needed} after alignment to a multiple of {alignment.total}, and a "
            f"microbatch takes max_tokens_per_microbatch = {max_tokens}: set it to {needed} or more"
        )


def _best_fit(aligned: np.ndarray, order: np.ndarray, room: int) -> list[list[int]]:
    """Each sequence, longest first, into the fullest microbatch that still takes it."""
    bins: list[list[int]] = []
    tokens = np.zeros(len(aligned), dtype=int)  # of each bin; one more bin than are open is offered
    for index in order.tolist():
        offered = tokens[: len(bins) + 1]
        best = int(np.where(offered + aligned[index] <= room, offered, -1).argmax())
        if best == len(bins):
            bins.append([])
        bins[best].append(index)
        tokens[best] += aligned[index]
    return bins


def _level(
    aligned: np.ndarray, costs: np.ndarray, order: np.ndarray, room: int, shape: tuple[int, int]
) -> Plan | None:
    """Each sequence to the cheapest rank with room, there to the cheapest microbatch.

    `shape` is (ranks, microbatches per rank). None when a sequence finds no room anywhere.
    """
    plan = _empty_plan(shape)
    tokens, load, rank_load = np.zeros(shape, dtype=int), np.zeros(shape), np.zeros(shape[0])
    for index in order.tolist():
        fits = tokens + aligned[index] <= room
        rank = int(np.where(fits.any(axis=1), rank_load, np.inf).argmin())
        slot = int(np.where(fits[rank], load[rank], np.inf).argmin())
        if not fits[rank, slot]:
            return None
        plan[rank][slot].append(index)
        tokens[rank, slot] += aligned[index]
        load[rank, slot] += costs[index]
        rank_load[rank] += costs[index]
    return plan


def _deal(bins: list[list[int]], costs: np.ndarray, shape: tuple[int, int]) -> Plan:
    """Whole microbatches, costliest first, to the cheapest rank with a free place."""
    plan = _empty_plan(shape)
    used, rank_load = np.zeros(shape[0], dtype=int), np.zeros(shape[0])
    for members in sorted(bins, key=lambda members: -costs[members].sum()):
        rank = int(np.where(used < shape[1], rank_load, np.inf).argmin())
        plan[rank][used[rank]] = members
        used[rank] += 1
        rank_load[rank] += costs[members].sum()
    return plan


def _empty_plan(shape: tuple[int, int]) -> Plan:
    return [[[] for _ in range(shape[1])] for _ in range(shape[0])]
