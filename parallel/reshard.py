"""Who sends which boxes to whom when weights go from trainer ranks to engine ranks. Integers only.

The workers of one engine, the first, receive every element of their shards once, straight from
trainer ranks that hold it; the other engines are fed by engines. Each trainer rank plans its own
sends from its own layout and those of an engine's workers. Where several ranks hold the same tensor
they come to the same list of what must be sent of it, and each takes its equal share of that list,
without a word between them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from parallel.layout import Box, Copy, Layout, Piece, overlaps


@dataclass(frozen=True)
class Sender:
    """What one trainer rank can send."""

    rank: int
    layout: Layout
    holders: Mapping[str, range]
    """Of each local tensor: the ranks that hold the very same one; none where nobody is to send
    it, because others hold its elements under another name."""


Shared = tuple[int, Piece, Piece, Box]
"""A worker, a piece that the sender has, one that the worker wants, and the box that they share."""


def plan_sends(
    sender: Sender, workers: Sequence[Layout], max_elements: int
) -> dict[int, list[Copy]]:
    """The copies that a trainer rank sends to each worker of the first engine, in order.

    `workers` are the layouts of the engine's workers; no copy has more than `max_elements`.
    """
    sends: dict[int, list[Copy]] = {}
    for holders, shared in _by_holders(sender, workers).items():
        index = holders.index(sender.rank)
        for worker, have, want, box in _share(shared, index, len(holders), max_elements):
            sends.setdefault(worker, []).append(Copy.of(have, want, box))
    return sends


def _by_holders(sender: Sender, workers: Sequence[Layout]) -> dict[range, list[Shared]]:
    """All that is to be sent of a rank's tensors, by the ranks that hold them.

    One worker after the other: an equal share of such a list goes to as few of them as can be.
    """
    groups: dict[range, list[Shared]] = {holders: [] for holders in sender.holders.values()}
    groups.pop(range(0), None)
    pieces = [piece for piece in sender.layout.pieces if sender.holders[piece.local]]
    for number, worker in enumerate(workers):
        for have, want, box in overlaps(pieces, worker.pieces):
            groups[sender.holders[have.local]].append((number, have, want, box))
    return groups


def _share(shared: Sequence[Shared], index: int, count: int, max_elements: int) -> Iterator[Shared]:
    """Part `index` of `count` equal parts of a list by its elements, up to whole rows."""
    total = sum(box.num_elements for *_, box in shared)
    low, high = total * index // count, total * (index + 1) // count
    position = 0
    for worker, have, want, box in shared:
        if position >= high:
            return
        part = _between(box, low - position, high - position)
        if part is not None:
            for smaller in part.cut(max_elements):
                yield worker, have, want, smaller
        position += box.num_elements


def _between(box: Box, low: int, high: int) -> Box | None:
    """The rows of a box that begin at its elements `low` to `high`; None when that is none."""
    if low <= 0 and high >= box.num_elements:
        return box
    dim = next((d for d, extent in enumerate(box.size) if extent > 1), 0)
    inner = box.num_elements // box.size[dim]
    first = max(0, -(-low // inner))
    end = min(box.size[dim], -(-high // inner))
    return box.narrowed(dim, first, end - first) if first < end else None


def check_arrivals(worker: Layout, copies: Iterable[Copy]) -> None:
    """Raise ValueError, listing every fault, unless each element of a worker arrives once."""
    pieces = tuple(
        Piece(copy.destination, copy.destination_box, copy.destination, copy.destination_box)
        for copy in copies
    )
    Layout(worker.shapes, pieces, worker.zeros).check_complete()


def fed_engines(engine: int, num_engines: int, branches: int = 1) -> range:
    """The engines to which `engine` passes on what it receives; engine 0 is fed by the trainer.

    Worker r of one feeds worker r of the next. In a chain (one branch) every worker receives and
    passes on its shard once, bucket by bucket, so that the last has it hardly later than the first;
    a tree has a shorter way to the last and sends `branches` times from each worker.
    """
    first = engine * branches + 1
    return range(min(first, num_engines), min(first + branches, num_engines))


@dataclass(frozen=True)
class Traffic:
    """The bytes of one push."""

    sent: list[int]
    """By each trainer rank."""
    received: list[int]
    """By each engine rank: all workers of the first engine, then those of the next."""
    forwarded: list[int]
    """By each engine rank, to those of other engines."""
    num_messages: int
    """Copies from trainer ranks to the first engine."""

    @property
    def imbalance(self) -> float:
        """Bytes of the busiest sender over those of the mean."""
        return max(self.sent) * len(self.sent) / sum(self.sent)


def traffic(
    senders: Iterable[Sender],
    workers: Sequence[Layout],
    *,
    num_ranks: int,
    num_engines: int,
    itemsize: int,
    max_elements: int,
    branches: int = 1,
) -> Traffic:
    """The bytes of one push, of elements of `itemsize` bytes, from all `num_ranks` trainer ranks.

    `senders` need hold only the first of the ranks that hold the same tensors.
    """
    sent, messages = [0] * num_ranks, 0
    received = [0] * len(workers)
    for sender in senders:
        for holders, shared in _by_holders(sender, workers).items():
            if holders[0] != sender.rank:
                continue
            for index, rank in enumerate(holders):
                for worker, _, _, box in _share(shared, index, len(holders), max_elements):
                    num_bytes = box.num_elements * itemsize
                    sent[rank] += num_bytes
                    received[worker] += num_bytes
                    messages += 1
    forwarded = [
        len(fed_engines(engine, num_engines, branches)) * num_bytes
        for engine in range(num_engines)
        for num_bytes in received
    ]
    return Traffic(sent, received * num_engines, forwarded, messages)
