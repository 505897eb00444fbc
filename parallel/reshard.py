"""Who sends which boxes to whom when weights go from trainer ranks to engine ranks. Integers only.

The workers of one engine, the first, receive every element of their shards once, straight from
trainer ranks that hold it. The engines are a chain: worker w of one passes on what it receives to
worker w of the next. Each trainer rank plans its own sends from its own layout and those of an
engine's workers. Where several ranks hold the same tensor they come to the same list of what must
be sent of it, and some take an equal share each of that list, without a word between them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from parallel.layout import Box, Copy, Layout, Piece, overlaps


@dataclass(frozen=True)
class Sender:
    """What one trainer rank can send."""

    rank: int
    layout: Layout
    holders: Mapping[str, range]
    """Of each local tensor: the ranks that hold the very same one; none where nobody is to send
    it, because others hold its elements under another name."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """Of a tensor that all tensor ranks of a stage hold (norms, router): their number, T; of others
    nothing. `holders` must go through these first. Worker w of n has it from those of tensor rank
    w * T // n, which send to it anyway."""


MAX_SHARERS = 4
"""Ranks that share what all of them could send, at most.

A worker has one network card, which a few senders fill, and a link has buffers and a communicator:
a job of a thousand ranks would have hundreds at each worker.
"""

Shared = tuple[int, Piece, Piece, Box]
"""A worker, a piece that the sender has, one that the worker wants, and the box that they share."""


def plan_sends(
    sender: Sender, workers: Sequence[Layout], max_elements: int
) -> dict[int, list[Copy]]:
    """The copies that a trainer rank sends to each worker of the first engine, in order.

    `workers` are the layouts of the engine's workers; no copy has more than `max_elements`.
    """
    return cut_shares(plan_shares(sender, workers), max_elements)


def plan_shares(sender: Sender, workers: Sequence[Layout]) -> list[Shared]:
    """What a trainer rank sends, before it is cut to a size that depends on who sends to whom."""
    return [
        share
        for holders, shared in _by_holders(sender, workers).items()
        if sender.rank in (sharers := _sharers(holders))
        for share in _share(shared, sharers.index(sender.rank), len(sharers))
    ]


def cut_shares(shares: Iterable[Shared], max_elements: int) -> dict[int, list[Copy]]:
    """By worker, the copies of what a rank sends, none of more than `max_elements`."""
    sends: dict[int, list[Copy]] = {}
    for worker, have, want, box in shares:
        copies = [Copy.of(have, want, part) for part in box.cut(max_elements)]
        sends.setdefault(worker, []).extend(copies)
    return sends


def _by_holders(sender: Sender, workers: Sequence[Layout]) -> dict[range, list[Shared]]:
    """All that is to be sent of a rank's tensors, by the ranks that are to send it.

    One worker after the other: an equal share of such a list goes to as few of them as can be.
    """
    groups: dict[range, list[Shared]] = {}
    pieces = [piece for piece in sender.layout.pieces if sender.holders[piece.local]]
    found = overlaps(pieces, [worker.pieces for worker in workers])
    for shared in sorted(found, key=itemgetter(0)):
        local = shared[1].local
        kinds = sender.kinds.get(local, 1)
        holders = sender.holders[local][shared[0] * kinds // len(workers) :: kinds]
        groups.setdefault(holders, []).append(shared)
    return groups


def _sharers(holders: range) -> range:
    """Those of the ranks that send, the first among them, evenly spread over their nodes."""
    return holders[:: -(-len(holders) // MAX_SHARERS)]


def _share(shared: Sequence[Shared], index: int, count: int) -> Iterator[Shared]:
    """Part `index` of `count` equal parts of a list by its elements, up to whole rows."""
    total = sum(box.num_elements for *_, box in shared)
    low, high = total * index // count, total * (index + 1) // count
    position = 0
    for worker, have, want, box in shared:
        if position >= high:
            return
        part = _between(box, low - position, high - position)
        if part is not None:
            yield worker, have, want, part
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


def check_push(senders: Iterable[Sender], workers: Sequence[Layout]) -> int:
    """Raise ValueError unless the shares of all ranks fill each worker's parameters once.

    `senders` need hold only the first of the ranks that hold the same tensors. Returns the number
    of boxes that are sent, before they are cut to size.
    """
    arrivals: list[list[Copy]] = [[] for _ in workers]
    for _, (worker, have, want, box) in all_shares(senders, workers):
        arrivals[worker].append(Copy.of(have, want, box))
    for number, (layout, copies) in enumerate(zip(workers, arrivals, strict=True)):
        try:
            check_arrivals(layout, copies)
        except ValueError as error:
            raise ValueError(f"worker {number} of {len(workers)}: {error}") from None
    return sum(map(len, arrivals))


def senders_by_worker(shares: Iterable[tuple[int, Shared]], num_workers: int) -> list[list[int]]:
    """Of each worker of the first engine: the trainer ranks that send to it, in ascending order.

    `shares` are `all_shares`.
    """
    ranks: list[set[int]] = [set() for _ in range(num_workers)]
    for rank, (worker, *_) in shares:
        ranks[worker].add(rank)
    return [sorted(found) for found in ranks]


def all_shares(
    senders: Iterable[Sender], workers: Sequence[Layout]
) -> Iterator[tuple[int, Shared]]:
    """(trainer rank, what it sends) of all that every rank sends, before boxes are cut to size.

    `senders` need hold only the first of the ranks that hold the same tensors.
    """
    for sender in senders:
        for holders, shared in _by_holders(sender, workers).items():
            if holders[0] != sender.rank:
                continue
            sharers = _sharers(holders)
            for index, rank in enumerate(sharers):
                for part in _share(shared, index, len(sharers)):
                    yield rank, part


@dataclass(frozen=True)
class Traffic:
    """The bytes of one push."""

    sent: list[int]
    """By each trainer rank."""
    received: list[int]
    """By each engine rank: all workers of the first engine, then those of the next."""
    forwarded: list[int]
    """By each engine rank, to that of the next engine."""
    num_messages: int
    """Copies from trainer ranks to the first engine."""

    @property
    def imbalance(self) -> float:
        """Bytes of the busiest sender over those of the mean."""
        return max(self.sent) * len(self.sent) / sum(self.sent)


def traffic(
    shares: Iterable[tuple[int, Shared]],
    *,
    num_workers: int,
    num_ranks: int,
    num_engines: int,
    itemsize: int,
    max_elements: int,
) -> Traffic:
    """The bytes of one push, of elements of `itemsize` bytes, from all `num_ranks` trainer ranks.

    `shares` are `all_shares`, sent to the `num_workers` of the first engine.
    """
    sent, messages = [0] * num_ranks, 0
    received = [0] * num_workers
    for rank, (worker, _, _, box) in shares:
        num_bytes = box.num_elements * itemsize
        sent[rank] += num_bytes
        received[worker] += num_bytes
        messages += len(box.cut(max_elements))
    forwarded = received * (num_engines - 1) + [0] * num_workers
    return Traffic(sent, received * num_engines, forwarded, messages)
