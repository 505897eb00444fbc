"""Which box of which local tensor is which box of which whole tensor. Integers only.

A `Layout` describes what one rank of one system (a Megatron rank, a folder of weight files, later
an engine's worker) holds, in the coordinates of the whole tensors. Loading, exporting and
resharding are then one operation: `intersect` two layouts and copy the boxes. `cover_exactly`
proves that nothing is missing and nothing is written twice.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from math import prod
from operator import add

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor of one dimension or more: first index and extent along each."""

    start: Shape
    size: Shape

    @classmethod
    def whole(cls, shape: Shape) -> "Box":
        """The box of a whole tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def end(self) -> Shape:
        """First index past the box, along each dimension."""
        return tuple(map(add, self.start, self.size))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the box in its tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))

    @property
    def num_elements(self) -> int:
        """Product of the extents."""
        return prod(self.size)

    def overlap(self, other: "Box") -> "Box | None":
        """What both boxes of one tensor have in common; None when that is nothing."""
        start = tuple(map(max, self.start, other.start))
        size = tuple(b - a for a, b in zip(start, map(min, self.end, other.end), strict=True))
        return Box(start, size) if min(size) > 0 else None

    def moved(self, origin: Shape, target: Shape) -> "Box":
        """The same box after `origin` is moved onto `target`."""
        return Box(
            tuple(a - o + t for a, o, t in zip(self.start, origin, target, strict=True)), self.size
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """`local_box` of the tensor `local` is `box` of the whole tensor `tensor`; equal sizes.

    A replica is filled like any other piece but is nobody's source: of all ranks that hold an
    element, exactly one holds it in a piece that is not a replica.
    """

    local: str
    local_box: Box
    tensor: str
    box: Box
    is_replica: bool = False


@dataclass(frozen=True)
class Layout:
    """What one rank holds.

    `shapes` are the local tensors; `pieces` and `zeros` (padding that exists in no whole tensor)
    together cover each of them exactly once.
    """

    shapes: Mapping[str, Shape]
    pieces: tuple[Piece, ...]
    zeros: tuple[tuple[str, Box], ...] = ()

    @classmethod
    def of_whole_tensors(cls, shapes: Mapping[str, Shape]) -> "Layout":
        """The layout of one holder of everything, such as a folder of weight files."""
        boxes = {name: Box.whole(shape) for name, shape in shapes.items()}
        return cls(shapes, tuple(Piece(name, box, name, box) for name, box in boxes.items()))

    def check_complete(self) -> None:
        """Raise ValueError unless every element of every local tensor is described once."""
        filled = [(piece.local, piece.local_box) for piece in self.pieces]
        _check_cover(self.shapes, [*filled, *self.zeros])

    def check_shapes(self, shapes: Mapping[str, Shape]) -> None:
        """Assert that `shapes` are the names and shapes of the local tensors."""
        differing = {
            name: (shapes.get(name), self.shapes.get(name))
            for name in {**shapes, **self.shapes}
            if shapes.get(name) != self.shapes.get(name)
        }
        assert not differing, f"tensor: (its shape, its shape in the layout): {differing}"


@dataclass(frozen=True, slots=True)
class Copy:
    """Move `source_box` of local tensor `source` to `destination_box` of `destination`."""

    source: str
    source_box: Box
    destination: str
    destination_box: Box


def intersect(source: Layout, destination: Layout) -> list[Copy]:
    """Every copy that `destination` can take from what `source` owns (replicas own nothing)."""
    owned: dict[str, list[Piece]] = defaultdict(list)
    wanted: dict[str, list[Piece]] = defaultdict(list)
    for piece in source.pieces:
        if not piece.is_replica:
            owned[piece.tensor].append(piece)
    for piece in destination.pieces:
        wanted[piece.tensor].append(piece)
    return [copy for name in wanted for copy in _overlaps(owned[name], wanted[name])]


def _overlaps(owned: list[Piece], wanted: list[Piece]) -> Iterable[Copy]:
    """Sweep along the first dimension, so that n row slices meet m in O(n + m)."""
    owned = sorted(owned, key=lambda piece: piece.box.start)
    first = 0
    for want in sorted(wanted, key=lambda piece: piece.box.start):
        while first < len(owned) and owned[first].box.end[0] <= want.box.start[0]:
            first += 1
        for have in islice(owned, first, None):
            if have.box.start[0] >= want.box.end[0]:
                break
            common = have.box.overlap(want.box)
            if common is not None:
                yield Copy(
                    have.local,
                    common.moved(have.box.start, have.local_box.start),
                    want.local,
                    common.moved(want.box.start, want.local_box.start),
                )


def cover_exactly(shapes: Mapping[str, Shape], layouts: Iterable[Layout]) -> None:
    """Raise ValueError, listing every fault, unless the layouts own each element exactly once.

    `shapes` are the whole tensors. Costs O(pieces log pieces) over all layouts together.
    """
    _check_cover(
        shapes,
        [
            (piece.tensor, piece.box)
            for layout in layouts
            for piece in layout.pieces
            if not piece.is_replica
        ],
    )


def _check_cover(shapes: Mapping[str, Shape], boxes: Iterable[tuple[str, Box]]) -> None:
    by_tensor: dict[str, list[Box]] = {name: [] for name in shapes}
    faults = []
    for name, box in boxes:
        if name not in shapes:
            faults.append(f"{name}: there is no such tensor")
        elif box.overlap(Box.whole(shapes[name])) != box:
            faults.append(f"{name}: {box} is outside its shape {shapes[name]}")
        else:
            by_tensor[name].append(box)
    for name, shape in shapes.items():
        missing, repeated = _miscovered(shape, by_tensor[name])
        if missing:
            faults.append(f"{name}: {missing} of {prod(shape)} elements are in no piece")
        if repeated:
            faults.append(f"{name}: {repeated} of {prod(shape)} elements are in several pieces")
    if faults:
        raise ValueError("the pieces do not cover the tensors exactly:\n  " + "\n  ".join(faults))


def _miscovered(shape: Shape, boxes: list[Box], dim: int = 0) -> tuple[int, int]:
    """How many elements no box covers, and how many more than one does.

    Cuts dimension `dim` wherever a box begins or ends; inside such a slab the set of boxes is
    constant, and the question is the same with one dimension less.
    """
    if dim == len(shape):
        return int(not boxes), int(len(boxes) > 1)
    waiting = sorted(boxes, key=lambda box: box.start[dim], reverse=True)
    cuts = {0, shape[dim], *(b.start[dim] for b in boxes), *(b.end[dim] for b in boxes)}
    active: list[Box] = []
    missing = repeated = 0
    for low, high in pairwise(sorted(cuts)):
        active = [box for box in active if box.end[dim] > low]
        while waiting and waiting[-1].start[dim] == low:
            active.append(waiting.pop())
        inner_missing, inner_repeated = _miscovered(shape, active, dim + 1)
        missing += inner_missing * (high - low)
        repeated += inner_repeated * (high - low)
    return missing, repeated
