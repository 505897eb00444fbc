"""Dynamic context parallelism: few ranks for short sequences, many for long ones.

The context ranks of a replica together hold the longest sequence. If all of them also split short
sequences, they exchange keys and values for nothing. So they take turns: in a turn of size s, each
block of s neighbours splits a microbatch of its own. With four ranks and microbatches a to g:

            size 4   size 2   size 1
    rank 0    a        b        d
    rank 1    a        b        e
    rank 2    a        c        f
    rank 3    a        c        g

A microbatch always has whole sequences, so loss and gradients do not depend on the turns. Cf.
FlexSP (arXiv 2412.01523) and ByteScale (arXiv 2502.21231).
"""

from collections.abc import Sequence

import numpy as np

from parallel.alignment import Alignment, round_up
from parallel.balance import Items, best_fit, fill
from parallel.dims import ParallelDims, divisors
from parallel.microbatches import CostModel, Turn, fixed_turns, plan_microbatches
from parallel.pipeline_sim import RAMPS, candidate_orders, makespan


def plan_turns(
    lengths: Sequence[int],
    max_tokens: int,
    dims: ParallelDims,
    alignment: Alignment,
    cost: CostModel,
    *,
    search: bool = True,
) -> list[list[Turn]]:
    """Turns of each data rank, for sequences of `lengths` tokens.

    A sequence is split over as few ranks as have memory for it: each holds `max_tokens` / context
    tokens. All data ranks have the same number of turns, a multiple of the pipeline size under
    interleaving. The plan without dynamic sizes is taken if the simulation finds it as fast.

    Raises ValueError if a sequence does not fit.
    """
    fixed = plan_microbatches(lengths, max_tokens, dims, alignment, cost, search=search)
    found = fixed_turns(fixed, dims.context)
    planner = _Planner(lengths, max_tokens, dims, alignment, cost)
    return min((found, planner.plan(search)), key=planner.time)


class _Planner:
    def __init__(
        self,
        lengths: Sequence[int],
        max_tokens: int,
        dims: ParallelDims,
        alignment: Alignment,
        cost: CostModel,
    ) -> None:
        self.dims, self.alignment, self.cost = dims, alignment, cost
        self.lengths = np.array(lengths, dtype=int)
        self.work = cost.linear * self.lengths + cost.quadratic * self.lengths.astype(float) ** 2
        totals = {size: alignment.for_context(size).total for size in divisors(dims.context)}
        self.capacity = {
            size: max_tokens * size // dims.context // total * total
            for size, total in totals.items()
        }
        """Most tokens of a microbatch, by the number of ranks that split it."""
        fits = [
            -(-self.lengths // totals[size]) * totals[size] <= room
            for size, room in self.capacity.items()
        ]
        # argmax finds the first True, and sizes ascend.
        self.size_of = np.array([*self.capacity])[np.array(fits).argmax(axis=0)]
        """[sequences] smallest number of ranks that have memory for the sequence."""

    def plan(self, search: bool) -> list[list[Turn]]:
        """Turns in descending order of size, or with `search` in the fastest simulated order."""
        ranks = [self._turns(members) for members in self._by_rank()]
        step = self.dims.pipeline if self.dims.virtual_pipeline > 1 else 1
        count = round_up(max(1, *map(len, ranks)), step)
        idle = Turn(context_size=1, microbatches=[[] for _ in range(self.dims.context)])
        ranks = [[*turns, *[idle] * (count - len(turns))] for turns in ranks]
        ramps = range(len(RAMPS) if search and self.dims.pipeline > 1 else 0)
        orders = [o for ramp in ramps for o in candidate_orders(count, self.dims.pipeline, ramp)]
        found = [ranks, *([[turns[i] for i in order] for turns in ranks] for order in orders)]
        return min(found, key=self.time)

    def time(self, ranks: list[list[Turn]]) -> float:
        """Time of the schedule on the slowest rank."""
        costs = np.array(
            [
                [self._cost(turn, context) for turn in turns]
                for turns in ranks
                for context in range(self.dims.context)
            ]
        )
        if self.dims.expert > 1:  # ranks wait for each other in every layer's all-to-all
            costs = costs.max(axis=0, keepdims=True)
        return float(makespan(costs, self.dims.pipeline, self.dims.virtual_pipeline).max())

    def _cost(self, turn: Turn, context: int) -> float:
        size = turn.context_size
        members = turn.microbatches[context // size]
        # A rank receives keys and values of the tokens that its neighbours hold.
        received = self.lengths[members].sum() * (size - 1) / size
        exchanged = self.cost.exchange * self.cost.linear * received
        overhead = self.cost.linear * self.cost.overhead
        return float(self.work[members].sum() / size + exchanged + overhead)

    def _by_rank(self) -> list[list[int]]:
        """Sequences of each data rank: costliest first, to the rank with least work."""
        ranks: list[list[int]] = [[] for _ in range(self.dims.data)]
        load = np.zeros(self.dims.data)
        for i in np.argsort(-self.work, kind="stable").tolist():
            rank = int(load.argmin())
            ranks[rank].append(i)
            load[rank] += self.work[i]
        return ranks

    def _turns(self, members: Sequence[int]) -> list[Turn]:
        """Turns of one data rank, largest size first; its `members` come costliest first."""
        turns, load = [], np.zeros(self.dims.context)
        for size in sorted(self.capacity, reverse=True):
            own = [i for i in members if self.size_of[i] == size]
            if own:
                # Its ranks may differ: a block of 4 has ranks of two blocks of 6.
                plan = self._filled(own, size, load.reshape(-1, size).max(axis=1))
                work = [sum(self.work[each].sum() for each in block) for block in plan]
                load += np.repeat(work, size) / size
                turns += [
                    Turn(context_size=size, microbatches=[sorted(block[n]) for block in plan])
                    for n in range(len(plan[0]))
                ]
        return turns

    def _filled(self, own: list[int], size: int, load: np.ndarray) -> list[list[list[int]]]:
        """Sequences of each block of `size` neighbours and each turn, costliest microbatch first.

        Blocks begin with `load` and end with equal work, as far as there is room.
        """
        multiple = self.alignment.for_context(size).sequence
        items = Items(
            tokens=-(-self.lengths[own] // multiple) * multiple,
            costs=self.work[own] / size,
            capacity=self.capacity[size],
            overhead=self.cost.linear * self.cost.overhead,
        )
        missing = np.maximum((load.sum() + items.costs.sum()) / len(load) - load, 0.0)
        count = -(-(int(best_fit(items).max()) + 1) // len(load))
        while (bins := fill(items, np.repeat(missing / count, count))) is None:
            count += 1
        plan: list[list[list[int]]] = [[[] for _ in range(count)] for _ in load]
        for i, bin_ in zip(own, bins.tolist(), strict=True):
            plan[bin_ // count][bin_ % count].append(i)
        return [sorted(block, key=lambda each: -self.work[each].sum()) for block in plan]
