"""Applies a function to whole matrices that are divided among the ranks of a group.

One rank with a part of a matrix receives the other parts, computes the function once and returns
the results (cf. Liu et al., arXiv 2502.16982, Algorithm 1, where all ranks with a part compute it).
It sees the whole matrix, so the result has the same bits however the matrix is divided.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel.layout import Box, Shape

MatrixPart = tuple[str, Box]
"""Name of a matrix, and a box in it."""


@dataclass
class _Round:
    """Matrices that are sent, computed and sent back together."""

    sent: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Numbers of this rank's parts, by the rank that computes their matrices."""
    received: dict[int, list[MatrixPart]] = field(default_factory=lambda: defaultdict(list))
    """Parts of the matrices that this rank computes, by the rank that holds them."""


class WholeMatrices:
    """Schedule of whole matrices over ranks. Every rank of the group makes the same calls."""

    def __init__(
        self,
        parts: Sequence[MatrixPart],
        shapes: Mapping[str, Shape],
        group: ProcessGroup,
        device: torch.device,
        max_elements: int,
    ) -> None:
        """`parts` are this rank's, float32 on `device`; copies on several ranks are equal.

        In a round a rank receives one matrix, or several with at most `max_elements` in all, each
        copy of a part included. Collective.
        """
        self._shapes, self._group, self._device = shapes, group, device
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, list(parts), group)
        owners = _owners(gathered, shapes)
        number_of = _round_numbers(owners, gathered, max_elements)
        self._rounds = [_Round() for _ in range(max(number_of.values(), default=-1) + 1)]
        for source, of_rank in enumerate(gathered):
            for index, (name, box) in enumerate(of_rank):
                each = self._rounds[number_of[name]]
                if source == rank:
                    each.sent[owners[name]].append(index)
                if owners[name] == rank:
                    each.received[source].append((name, box))

    def apply(self, function: Callable[[Tensor], Tensor], parts: Sequence[Tensor]) -> None:
        """Replace every matrix by ``function(matrix)``, in this rank's `parts`."""
        for each in self._rounds:
            self._apply(each, function, parts)

    def _apply(
        self, each: _Round, function: Callable[[Tensor], Tensor], parts: Sequence[Tensor]
    ) -> None:
        ranks = range(dist.get_world_size(self._group))
        sent = [[parts[index] for index in each.sent[rank]] for rank in ranks]
        own = [part for of_rank in sent for part in of_rank]
        # `cat` needs a tensor, and a rank may have no parts in a round.
        nothing = torch.empty(0, device=self._device)
        outgoing = torch.cat([nothing, *(part.flatten() for part in own)])
        num_sent = [sum(part.numel() for part in of_rank) for of_rank in sent]
        num_received = [sum(box.num_elements for _, box in each.received[r]) for r in ranks]
        incoming = outgoing.new_empty(sum(num_received))
        dist.all_to_all_single(incoming, outgoing, num_received, num_sent, group=self._group)
        # `values` are views of `incoming`: results take the places of parts, for the way back.
        for name, boxes in _by_matrix(each, incoming, ranks).items():
            whole = incoming.new_empty(self._shapes[name])
            for box, values in boxes:
                whole[box.slices] = values
            result = function(whole)
            for box, values in boxes:
                values.copy_(result[box.slices])
        dist.all_to_all_single(outgoing, incoming, num_sent, num_received, group=self._group)
        for part, values in zip(own, outgoing.split([p.numel() for p in own]), strict=True):
            part.copy_(values.view(part.shape))


def _by_matrix(
    each: _Round, incoming: Tensor, ranks: Sequence[int]
) -> dict[str, list[tuple[Box, Tensor]]]:
    """Boxes of each matrix, with their values as views of `incoming`."""
    found: dict[str, list[tuple[Box, Tensor]]] = defaultdict(list)
    boxes = [part for rank in ranks for part in each.received[rank]]
    sizes = [box.num_elements for _, box in boxes]
    for (name, box), values in zip(boxes, incoming.split(sizes), strict=True):
        found[name].append((box, values.view(box.size)))
    return found


def _owners(parts: Sequence[Sequence[MatrixPart]], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Rank that computes each matrix, from the `parts` of each rank.

    Greedy: the costliest matrix first, on the least busy rank that has a part of it.
    """
    holders: dict[str, set[int]] = defaultdict(set)
    for rank, of_rank in enumerate(parts):
        for name, _ in of_rank:
            holders[name].add(rank)
    # Names and ranks break ties, so that all ranks find the same owners.
    owners, busy = {}, [0] * len(parts)
    for name in sorted(holders, key=lambda name: (-_cost(shapes[name]), name)):
        owners[name] = min(holders[name], key=lambda rank: (busy[rank], rank))
        busy[owners[name]] += _cost(shapes[name])
    return owners


def _cost(shape: Shape) -> int:
    """Multiplications in X X^T X, up to a factor: the cost of Newton-Schulz, for example."""
    return min(shape) * prod(shape)


def _round_numbers(
    owners: Mapping[str, int], parts: Sequence[Sequence[MatrixPart]], max_elements: int
) -> dict[str, int]:
    """Round of each matrix: in a round a rank receives at most `max_elements`, or one matrix."""
    arriving: dict[str, int] = defaultdict(int)
    for name, box in chain.from_iterable(parts):
        arriving[name] += box.num_elements
    numbers: dict[str, int] = {}
    at: dict[int, tuple[int, int]] = {}  # rank -> (round that it fills, elements there)
    for name, owner in owners.items():
        number, filled = at.get(owner, (0, 0))
        if filled and filled + arriving[name] > max_elements:
            number, filled = number + 1, 0
        numbers[name], at[owner] = number, (number, filled + arriving[name])
    return numbers
