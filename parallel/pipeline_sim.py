"""Target costs of microbatches that make a pipeline fast, by simulating how long it takes.

Stages wait for the first microbatch to arrive and for the last to return, so those at the ends
should be cheaper. Two stages, microbatches a b c (lower case forward, upper case backward, which
takes twice as long):

    stage 0:  a b . . A A c B B . C C      time ->
    stage 1:  . a A A b B B c C C . .

A stage idles (.) while a or C is on the other one: less, if work is moved from a and c to b.

How a plan is searched: `_counts` of microbatches x `RAMPS` give weights; `_scale_to_work` turns
them into costs that add up to a rank's work; `candidate_orders` says which of these costs runs
when; `makespan` times it. The best become target costs for `balance.fill`.

Stages run the operations of Megatron-Core, in its order (`forward_backward_pipelining_*` of
`megatron.core.pipeline_parallel.schedules`): warm-up forwards, then alternately one forward and one
backward, then the remaining backwards. An operation starts when its stage has finished the previous
one and the neighbour has sent its input. Sending takes no time, and senders do not wait for the
receiver.
"""

import math
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from parallel.balance import Items
from parallel.dims import ParallelDims

ABSENT = -np.inf
"""Cost of a missing microbatch, to pad rows of different lengths in one array."""


class Operation(NamedTuple):
    """A forward or backward pass of one microbatch in one model chunk of a stage."""

    is_backward: bool
    chunk: int
    microbatch: int


def stage_operations(
    stage: int, count: int, pipeline: int, virtual_pipeline: int = 1
) -> list[Operation]:
    """Operations of a stage in Megatron's order, for `count` microbatches.

    With interleaving, each group of `pipeline` microbatches goes through all chunks of a stage
    (section 2.2 of Narayanan et al., arXiv 2104.04473): `count` must be a multiple of `pipeline`.
    """
    group = pipeline if virtual_pipeline > 1 else count
    assert count % group == 0, f"{count} microbatches are not a multiple of {pipeline} stages"
    turns = [
        (chunk, i)
        for first in range(0, count, group)
        for chunk in range(virtual_pipeline)
        for i in range(first, first + group)
    ]
    forwards = [Operation(False, chunk, i) for chunk, i in turns]
    backwards = [Operation(True, virtual_pipeline - 1 - chunk, i) for chunk, i in turns]
    # Warm-up forwards as Megatron-Core's `get_pp_rank_microbatches` counts them.
    ahead = pipeline - 1 - stage
    if virtual_pipeline > 1:
        ahead = 2 * ahead + (virtual_pipeline - 1) * pipeline
    ahead = min(ahead, len(forwards))
    in_turn = chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))
    return [*forwards[:ahead], *in_turn, *backwards[len(forwards) - ahead :]]


class _Schedule(NamedTuple):
    """Operations of all stages, numbered from 1 such that each comes after all that it waits for.

    Number 0 stands for the start. The arrays have one element for each operation.
    """

    microbatch: np.ndarray
    factor: np.ndarray
    """Duration, as a multiple of the microbatch's cost."""
    previous: np.ndarray
    """Number of the operation before it on the stage."""
    source: np.ndarray
    """Number of the operation that produces its input."""
    waves: list[slice]
    """Operations on different stages that do not wait for each other."""


@lru_cache(maxsize=256)
def _schedule(count: int, pipeline: int, virtual_pipeline: int) -> _Schedule:
    queues = [
        deque(stage_operations(stage, count, pipeline, virtual_pipeline))
        for stage in range(pipeline)
    ]
    last = pipeline * virtual_pipeline - 1
    numbers: dict[tuple[bool, int, int], int] = {}
    latest = [0] * pipeline
    operations: list[tuple[int, float, int, int]] = []
    waves = []
    while any(queues):
        begin, wave = len(operations), {}
        for stage, queue in enumerate(queues):
            if not queue:
                continue
            is_backward, chunk, i = queue[0]
            part = chunk * pipeline + stage
            if part == (last if is_backward else 0):
                # The first chunk's forward has no input, and the last chunk's backward needs only
                # its own forward, which comes earlier on the same stage.
                source = 0
            elif (needed := (is_backward, part + 2 * is_backward - 1, i)) in numbers:
                source = numbers[needed]
            else:
                continue
            queue.popleft()
            operations.append((i, (1 + is_backward) / virtual_pipeline, latest[stage], source))
            wave[is_backward, part, i] = latest[stage] = len(operations)
        numbers |= wave  # after the loop: operations of one wave must not feed each other
        waves.append(slice(begin, len(operations)))
    microbatch, factor, previous, sources = map(np.array, zip(*operations, strict=True))
    return _Schedule(microbatch, factor, previous, sources, waves)


def makespan(costs: np.ndarray, pipeline: int, virtual_pipeline: int = 1) -> np.ndarray:
    """Time from the first forward to the last backward, for each row of `costs`.

    `costs` [rows, microbatches] are for a forward on one stage, all its chunks together; a backward
    takes twice as long. Rows may end with `ABSENT`. With interleaving, the number of
    microbatches must be a multiple of the pipeline size.
    """
    if pipeline == virtual_pipeline == 1:  # one operation after the other
        passes = np.repeat(np.maximum(costs, 0.0), 2, axis=1) * np.tile([1, 2], costs.shape[1])
        totals: np.ndarray = np.cumsum(passes, axis=1)[:, -1]
        return totals
    schedule = _schedule(costs.shape[1], pipeline, virtual_pipeline)
    work = costs.T[schedule.microbatch] * schedule.factor[:, None]
    ends = np.zeros((1 + len(work), len(costs)))  # of each operation, after the start
    for wave in schedule.waves:
        ready = ends[schedule.previous[wave]]
        done = np.maximum(ready, ends[schedule.source[wave]]) + work[wave]
        np.maximum(ready, done, out=ends[1:][wave])  # absent microbatches take no time
    times: np.ndarray = ends.max(axis=0)
    return times


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """How the cost of microbatches rises at the start of the schedule and falls at its end.

    `first` and `last` are the costs at the ends, as fractions of the cost in the middle; `rise` and
    `fall` are the lengths of the ramps, in multiples of the pipeline size.
    """

    first: float = 1.0
    rise: float = 0.0
    last: float = 1.0
    fall: float = 0.0

    def weights(self, microbatches: int, pipeline: int) -> np.ndarray:
        """Cost of each microbatch, as a fraction of the cost in the middle."""
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
"""Near-optimal for 2 to 16 stages and various numbers of microbatches: fewer need shorter ramps.

Found by a grid search with `makespan`; the last is for interleaved stages.
"""
CENTRES = (0.0, 0.3, 0.5, 0.7, 1.0)
"""Relative positions around which the costliest of equally weighted microbatches are placed."""
NUM_COUNTS = 12
"""Maximum number of microbatch counts to try."""
OPERATIONS = 20_000
"""Bound on the operations in all these schedules: large pipelines try fewer counts."""
MOST_FILLED = 10
"""Maximum number of targets, most promising first, for which bins are filled."""
PLACEMENTS = 20_000
"""Bound on the number of item placements over all targets, which bounds the planning time."""


def candidate_targets(items: Items, fewest: int, step: int, dims: ParallelDims) -> list[np.ndarray]:
    """Target costs [data rank, microbatch], descending for each rank; most promising first."""
    per_rank = items.costs.sum() / dims.data
    counts = _counts(items, fewest, step, dims)
    ramps = range(len(RAMPS) if dims.pipeline > 1 else 1)
    shapes = [(count, ramp) for count in counts for ramp in ramps]
    weights = np.zeros((len(shapes), counts[-1]))
    for row, (count, ramp) in zip(weights, shapes, strict=True):
        row[:count] = -np.sort(-RAMPS[ramp].weights(count, dims.pipeline))
    held = _largest(items, counts[-1], dims.data)
    mean = _scale_to_work(weights, held.mean(axis=0) * (weights > 0), per_rank, items)
    rows, shape_of = [], []
    for i, (count, ramp) in enumerate(shapes):
        for order in candidate_orders(count, dims.pipeline, ramp):
            row = np.full(counts[-1], ABSENT)
            row[:count] = mean[i, :count][order] + items.overhead
            rows.append(row)
            shape_of.append(i)
    times = np.full(len(shapes), np.inf)
    np.minimum.at(times, shape_of, makespan(np.array(rows), dims.pipeline, dims.virtual_pipeline))
    num = min(max(PLACEMENTS // max(len(items.costs), 1), 1), MOST_FILLED)
    targets = []
    for i in np.argsort(times, kind="stable")[:num].tolist():
        count = shapes[i][0]
        of_ranks = np.tile(weights[i, :count], (dims.data, 1))
        targets.append(_scale_to_work(of_ranks, held[:, :count], per_rank, items))
    return targets


def _counts(items: Items, fewest: int, step: int, dims: ParallelDims) -> list[int]:
    """Numbers of microbatches to try, ascending.

    With a rank's work W split into k equal microbatches, each with overhead o, the schedule takes
    (W / k + o) (k + (p - 1) / v): least at k = sqrt(W (p - 1) / (v o)). Ramps need fewer.
    """
    fill_and_drain = (dims.pipeline - 1) / dims.virtual_pipeline
    work = items.costs.sum() / dims.data
    most = math.ceil(len(items.costs) / dims.data)
    if items.overhead > 0:
        most = min(most, math.ceil(math.sqrt(work * fill_and_drain / items.overhead)))
    most = max(most // step * step, fewest)
    operations = 2 * fewest * dims.pipeline * dims.virtual_pipeline
    num = min(NUM_COUNTS, max(OPERATIONS // operations, 1), (most - fewest) // step + 1)
    spread = np.geomspace(fewest, most, num)
    return sorted({int(count) for count in np.round(spread / step) * step})


def _largest(items: Items, count: int, ranks: int) -> np.ndarray:
    """Cost of the largest item in each of the `count` microbatches of each rank, descending."""
    largest = np.zeros(count * ranks)
    num = min(len(largest), len(items.costs))
    largest[:num] = items.costs[:num]
    by_rank, load = np.empty((ranks, count)), np.zeros(ranks)
    for place, row in enumerate(largest.reshape(count, ranks)):
        by_rank[np.argsort(load, kind="stable"), place] = row
        load += by_rank[:, place]
    return by_rank


def _scale_to_work(
    weights: np.ndarray, least: np.ndarray, per_rank: float, items: Items
) -> np.ndarray:
    """Costs ``level * weights`` [rows, microbatches]; every row sums to a rank's work.

    A microbatch costs at least `least`, its largest item, and at most a microbatch full of average
    items; then the sum may fall short. Example: weights 1 1 0.5 and
    work 10 give 4 4 2; with a cap of 3.5 they give 3.5 3.5 3. `level` is found by bisection.
    """
    full = items.capacity * items.costs.sum() / max(items.tokens.sum(), 1)
    low, high = np.zeros(len(weights)), np.full(len(weights), full / weights[weights > 0].min())
    for _ in range(40):
        level = (low + high) / 2
        levelled = np.maximum(np.minimum(level[:, None] * weights, full), least)
        short = levelled.sum(axis=1) < per_rank
        low, high = np.where(short, level, low), np.where(short, high, level)
    return np.maximum(np.minimum(high[:, None] * weights, full), least)


@lru_cache(maxsize=256)
def candidate_orders(count: int, pipeline: int, ramp: int) -> list[np.ndarray]:
    """Orders in which to run microbatches that are sorted by cost, costliest first.

    The higher the ramp's weight at a position, the costlier its microbatch. Weights 0.3 1 1 0.6
    give [3, 0, 1, 2] or [3, 1, 0, 2]: the cheapest first, the second cheapest last. Positions of
    equal weight are filled outwards from each of the `CENTRES`; equal orders occur once.
    """
    weights = RAMPS[ramp].weights(count, pipeline)
    places = np.arange(count)
    # As bytes: the set drops equal orders; sorted, they come in one order on all ranks.
    orders = {
        np.lexsort((abs(places - centre * (count - 1)), -weights)).argsort().tobytes()
        for centre in (CENTRES if pipeline > 1 else CENTRES[:1])
    }
    return [np.frombuffer(order, dtype=int) for order in sorted(orders)]
