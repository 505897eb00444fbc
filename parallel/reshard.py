"""Plans which rank sends which boxes to which engine worker in a push of weights. Integers only.

The workers of the first engine receive every element of their shards once, directly from trainer
ranks that hold it. The engines form a chain: worker w of one forwards what it receives to worker w
of the next. Each trainer rank plans its own sends from its own layout and the layouts of an
engine's workers. Ranks that hold the same tensor compute the same list of boxes to send, and up to
`MAX_SHARERS` of them take an equal share each, without communication.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from parallel.layout import Box, Copy, Layout, ShardMapping, overlaps


@dataclass(frozen=True)
class Sender:
    """Boxes that one trainer rank can send."""

    rank: int
    layout: Layout
    owners: Mapping[str, range]
    """Ranks that hold an identical copy of each local tensor. Empty for a tied output layer: its
    elements are sent as the embedding's."""
    replica_sets: Mapping[str, int] = field(default_factory=dict)
    """T for each tensor that all T tensor ranks of a stage hold (norms, router). Its `owners`, with
    the tensor rank varying fastest, then form T sets, one for each tensor rank. Worker w of n gets
    the tensor from set w * T // n: these ranks send the worker its other weights anyway."""


MAX_SHARERS = 4
"""Maximum number of ranks that share the sending of a tensor that all of them hold.

A few senders saturate the network card of a worker, and each channel costs buffers and a
communicator: without the limit, a job of a thousand ranks would have hundreds of them per worker.
"""


class Shared(NamedTuple):
    """A box that both a sender and a worker of an engine hold."""

    worker: int
    have: ShardMapping
    """The sender's piece."""
    want: ShardMapping
    """The worker's piece."""
    box: Box


def plan_sends(
    sender: Sender, workers: Sequence[Layout], max_elements: int
) -> dict[int, list[Copy]]:
    """Copies that a trainer rank sends to each worker of the first engine, in order.

    `workers` are the layouts of the engine's workers; no copy exceeds `max_elements`.
    """
    return cut_shares(plan_shares(sender, workers), max_elements)


def plan_shares(sender: Sender, workers: Sequence[Layout]) -> list[Shared]:
    """Shares that a trainer rank sends, before boxes are cut to the bucket size.

    The bucket size depends on which ranks send to which workers.
    """
    return [
        share
        for owners, shared in _by_owners(sender, workers).items()
        if sender.rank in (sharers := _sharers(owners))
        for share in _share(shared, sharers.index(sender.rank), len(sharers))
    ]


def cut_shares(shares: Iterable[Shared], max_elements: int) -> dict[int, list[Copy]]:
    """Copies of a rank's `shares`, by worker, none larger than `max_elements`."""
    sends: dict[int, list[Copy]] = {}
    for worker, have, want, box in shares:
        copies = [Copy.between(have, want, part) for part in box.cut(max_elements)]
        sends.setdefault(worker, []).extend(copies)
    # In order of destination, many copies fill consecutive rows: `checksum.joined` merges these.
    for ordered in sends.values():
        ordered.sort(key=lambda copy: (copy.destination, copy.destination_box.start))
    return sends


def _by_owners(sender: Sender, workers: Sequence[Layout]) -> dict[range, list[Shared]]:
    """Boxes of a rank's tensors that workers need, grouped by the ranks that can send them."""
    groups: dict[range, list[Shared]] = {}
    pieces = [piece for piece in sender.layout.pieces if sender.owners[piece.local]]
    found = overlaps(pieces, [worker.pieces for worker in workers])
    # By worker: an equal share of each list then goes to as few workers as possible.
    for shared in sorted((Shared(*each) for each in found), key=attrgetter("worker")):
        local = shared.have.local
        num_sets = sender.replica_sets.get(local, 1)
        replica_set = shared.worker * num_sets // len(workers)
        owners = sender.owners[local][replica_set::num_sets]  # every num_sets-th is in this set
        groups.setdefault(owners, []).append(shared)
    return groups


def _sharers(owners: range) -> range:
    """The owners that send: the first one, and others spread evenly over the nodes.

    At most `MAX_SHARERS`: of 4 all, of 5 every second (3), of 9 every third (3), of 64 every 16th.
    """
    return owners[:: -(-len(owners) // MAX_SHARERS)]


def _share(shared: Sequence[Shared], index: int, count: int) -> Iterator[Shared]:
    """Part `index` of `count` parts of a list, with equal numbers of elements up to a row."""
    total = sum(box.num_elements for *_, box in shared)
    low, high = total * index // count, total * (index + 1) // count
    position = 0
    for worker, have, want, box in shared:
        if position >= high:
            return
        part = _between(box, low - position, high - position)
        if part is not None:
            yield Shared(worker, have, want, part)
        position += box.num_elements


def _between(box: Box, low: int, high: int) -> Box | None:
    """The rows of a box that begin within its elements [`low`, `high`); None if there are none."""
    if low <= 0 and high >= box.num_elements:
        return box
    dim = next((d for d, extent in enumerate(box.size) if extent > 1), 0)
    inner = box.num_elements // box.size[dim]
    # A row belongs to the part in which it begins: parts neither overlap nor leave a gap.
    first = max(0, -(-low // inner))
    end = min(box.size[dim], -(-high // inner))
    return box.narrowed(dim, first, end - first) if first < end else None


def check_arrivals(worker: Layout, copies: Iterable[Copy]) -> None:
    """Raise ValueError, listing every fault, unless a worker's elements arrive exactly once."""
    pieces = tuple(
        ShardMapping(copy.destination, copy.destination_box, copy.destination, copy.destination_box)
        for copy in copies
    )
    Layout(worker.shapes, pieces, worker.zeros).check_complete()


def check_push(senders: Iterable[Sender], workers: Sequence[Layout]) -> int:
    """Raise ValueError unless the shares of all ranks fill each worker's parameters exactly once.

    `senders` needs only the first of several ranks with the same tensors. Returns the number of
    boxes that are sent, before they are cut to size.
    """
    arrivals: list[list[Copy]] = [[] for _ in workers]
    for _, (worker, have, want, box) in all_shares(senders, workers):
        arrivals[worker].append(Copy.between(have, want, box))
    for number, (layout, copies) in enumerate(zip(workers, arrivals, strict=True)):
        try:
            check_arrivals(layout, copies)
        except ValueError as error:
            raise ValueError(f"worker {number} of {len(workers)}: {error}") from None
    return sum(map(len, arrivals))


def senders_by_worker(shares: Iterable[tuple[int, Shared]], num_workers: int) -> list[list[int]]:
    """For each worker of the first engine, the trainer ranks that send to it, ascending.

    `shares` come from `all_shares`.
    """
    ranks: list[set[int]] = [set() for _ in range(num_workers)]
    for rank, (worker, *_) in shares:
        ranks[worker].add(rank)
    return [sorted(found) for found in ranks]


def all_shares(
    senders: Iterable[Sender], workers: Sequence[Layout]
) -> Iterator[tuple[int, Shared]]:
    """Yields (trainer rank, share) for all shares of all ranks, before boxes are cut.

    `senders` needs only the first of several ranks with the same tensors.
    """
    for sender in senders:
        for owners, shared in _by_owners(sender, workers).items():
            # All owners plan the same shares: yield them once.
            if owners[0] != sender.rank:
                continue
            sharers = _sharers(owners)
            for index, rank in enumerate(sharers):
                for part in _share(shared, index, len(sharers)):
                    yield rank, part
