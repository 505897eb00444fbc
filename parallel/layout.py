"""Maps boxes of local tensors to boxes of whole tensors. Integers only.

A `Layout` lists the boxes that one holder of weights has (a Megatron rank, a folder of weight
files, an engine's worker), in coordinates of the whole tensors. Loading, exporting and resharding
are then the same operation: `intersect` two layouts and copy the boxes. `cover_exactly` checks that
nothing is missing and nothing is written twice.

A local tensor may store a whole tensor transposed, or as one slice of a stack:
`ShardMapping.axes` says which local dimension corresponds to each dimension of the whole tensor.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from operator import add

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: its offsets and sizes, like a "chunk" of torch's DCP."""

    start: Shape
    size: Shape

    @classmethod
    def whole(cls, shape: Shape) -> "Box":
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
        return prod(self.size)

    def overlap(self, other: "Box") -> "Box | None":
        """The intersection with another box of the same tensor; None if empty."""
        start = tuple(map(max, self.start, other.start))
        size = tuple(b - a for a, b in zip(start, map(min, self.end, other.end), strict=True))
        return Box(start, size) if min(size) > 0 else None

    def moved(self, origin: Shape, target: Shape) -> "Box":
        """The box translated by ``target - origin``."""
        return Box(
            tuple(a - o + t for a, o, t in zip(self.start, origin, target, strict=True)), self.size
        )

    def cut(self, max_elements: int) -> "list[Box]":
        """Split the box into parts of at most `max_elements`, along its leading dimensions."""
        if self.num_elements <= max_elements:
            return [self]
        dim = next(d for d, extent in enumerate(self.size) if extent > 1)
        inner = self.num_elements // self.size[dim]
        step = max(1, max_elements // inner)
        parts = [
            self.narrowed(dim, offset, min(step, self.size[dim] - offset))
            for offset in range(0, self.size[dim], step)
        ]
        if inner <= max_elements:
            return parts
        # A single index of this dimension is still too large: cut along the next dimension.
        return [smaller for part in parts for smaller in part.cut(max_elements)]

    def narrowed(self, dim: int, offset: int, size: int) -> "Box":
        """The part with `size` indices of dimension `dim`, from `offset` within the box."""
        starts, sizes = list(self.start), list(self.size)
        starts[dim] += offset
        sizes[dim] = size
        return Box(tuple(starts), tuple(sizes))


Axes = tuple[int, ...]
"""``axes[d]``: the local dimension that corresponds to dimension d of the whole tensor.

Empty means the same dimensions in the same order. A transposed matrix has (1, 0), a matrix inside a
stack [layer, rows, columns] has (1, 2); a box has extent 1 along local dimensions not listed.
"""


@dataclass(frozen=True, slots=True)
class ShardMapping:
    """`local_box` of the tensor `local` is `box` of the whole tensor `tensor`; sizes agree by axes.

    A replica is filled like any other piece but is never a source: exactly one rank holds each
    element in a piece that is no replica.
    """

    local: str
    local_box: Box
    tensor: str
    box: Box
    is_replica: bool = False
    axes: Axes = ()

    def local_part(self, part: Box) -> Box:
        """The box of the local tensor that holds `part`, a box of the whole tensor within `box`."""
        # Local dimensions that `axes` does not list keep their extent of 1.
        start, size = list(self.local_box.start), list(self.local_box.size)
        for dim, axis in enumerate(self.axes or range(len(start))):
            start[axis] += part.start[dim] - self.box.start[dim]
            size[axis] = part.size[dim]
        return Box(tuple(start), tuple(size))

    def whole_part(self, local_part: Box) -> Box:
        """The inverse of `local_part`."""
        axes = self.axes or tuple(range(len(self.box.start)))
        start = tuple(
            whole + local_part.start[axis] - self.local_box.start[axis]
            for whole, axis in zip(self.box.start, axes, strict=True)
        )
        return Box(start, tuple(local_part.size[axis] for axis in axes))


@dataclass(frozen=True)
class Layout:
    """Shard of one rank: its local tensors, as boxes of whole tensors.

    `shapes` are of the local tensors. `pieces` and `zeros` (padding that exists in no whole tensor)
    together cover each element of them exactly once.
    """

    shapes: Mapping[str, Shape]
    pieces: tuple[ShardMapping, ...]
    zeros: tuple[tuple[str, Box], ...] = ()

    @classmethod
    def of_whole_tensors(cls, shapes: Mapping[str, Shape]) -> "Layout":
        """Layout of a holder of all tensors, whole, such as a folder of weight files."""
        boxes = {name: Box.whole(shape) for name, shape in shapes.items()}
        return cls(shapes, tuple(ShardMapping(name, box, name, box) for name, box in boxes.items()))

    @classmethod
    def of_parts(cls, shapes: Mapping[str, Shape], max_elements: int) -> "Layout":
        """Layout of a holder of all tensors, cut into local tensors of at most `max_elements`."""
        pieces = []
        for name, shape in shapes.items():
            for number, box in enumerate(Box.whole(shape).cut(max_elements)):
                pieces.append(ShardMapping(f"{name}[{number}]", Box.whole(box.size), name, box))
        return cls({piece.local: piece.box.size for piece in pieces}, tuple(pieces))

    @property
    def num_elements(self) -> int:
        return sum(map(prod, self.shapes.values()))

    def check_complete(self) -> None:
        """Raise ValueError unless every element of every local tensor is described exactly once."""
        filled = [(piece.local, piece.local_box) for piece in self.pieces]
        _check_cover(self.shapes, [*filled, *self.zeros])

    def check_shapes(self, shapes: Mapping[str, Shape]) -> None:
        """Assert that `shapes` are the names and shapes of the local tensors."""
        differing = {
            name: (shapes.get(name), self.shapes.get(name))
            for name in {**shapes, **self.shapes}
            if shapes.get(name) != self.shapes.get(name)
        }
        assert not differing, f"{{name: (shape of the tensor, in the layout)}}: {differing}"

    def compose(self, outer: "Layout") -> "Layout":
        """Local tensors of `self` as boxes of the whole tensors of `outer`.

        The whole tensors of `self` are the local ones of `outer`. For example, files hold a fused
        tensor in chunks (`self`), and parts of it are weights of the model (`outer`)::

            self:   chunk 0 = qkv[0:3], chunk 1 = qkv[3:6]       |--- 0 ---|--- 1 ---|
            outer:  qkv[0:4] = q[0:4],  qkv[4:6] = k[0:2]        |----- q -----|- k -|
            result: chunk 0 = q[0:3], chunk 1[0:1] = q[3:4], chunk 1[1:3] = k[0:2]

        Elements outside all pieces of `outer` are in no piece of the result.
        """
        inner = _grouped((piece.tensor, (piece.box, piece)) for piece in self.pieces)
        middle = _grouped((piece.local, (piece.local_box, piece)) for piece in outer.pieces)
        pieces = tuple(
            ShardMapping(
                have.local,
                have.local_part(common),
                want.tensor,
                want.whole_part(common),
                # A source only if it is one at both levels.
                have.is_replica or want.is_replica,
                tuple(have.axes[axis] for axis in want.axes)
                if have.axes and want.axes
                else have.axes or want.axes,
            )
            for name in middle
            for have, want, common in _overlaps(inner[name], middle[name])
        )
        padding = _grouped((name, (box, None)) for name, box in outer.zeros)
        zeros = tuple(
            (have.local, have.local_part(common))
            for name in padding
            for have, _, common in _overlaps(inner[name], padding[name])
        )
        return Layout(self.shapes, pieces, (*self.zeros, *zeros))


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy `source_box` of local tensor `source` to `destination_box` of `destination`.

    Both are one box of a whole tensor; the axes map its dimensions to the local ones.
    """

    source: str
    source_box: Box
    destination: str
    destination_box: Box
    source_axes: Axes = ()
    destination_axes: Axes = ()

    @classmethod
    def between(cls, have: ShardMapping, want: ShardMapping, box: Box) -> "Copy":
        """Copy of `box`, in coordinates of the whole tensor, from piece `have` to `want`."""
        source, destination = have.local_part(box), want.local_part(box)
        return cls(have.local, source, want.local, destination, have.axes, want.axes)


def intersect(source: Layout, destination: Layout) -> list[Copy]:
    """Every copy from pieces of `source` that are no replicas to pieces of `destination`."""
    owned = (piece for piece in source.pieces if not piece.is_replica)
    return [
        Copy.between(have, want, box)
        for _, have, want, box in overlaps(owned, [destination.pieces])
    ]


def overlaps(
    source: Iterable[ShardMapping], destinations: Sequence[Iterable[ShardMapping]]
) -> Iterator[tuple[int, ShardMapping, ShardMapping, Box]]:
    """All pairs of pieces that overlap in a whole tensor, with the box of their overlap.

    Yields (number of the destination, source piece, destination piece, box), tensor by tensor.
    """
    owned = _grouped((piece.tensor, (piece.box, piece)) for piece in source)
    wanted = _grouped(
        (piece.tensor, (piece.box, (number, piece)))
        for number, pieces in enumerate(destinations)
        for piece in pieces
        if piece.tensor in owned
    )
    for name, boxes in wanted.items():
        for have, (number, want), box in _overlaps(owned[name], boxes):
            yield number, have, want, box


def _grouped[K: Hashable, H](items: Iterable[tuple[K, H]]) -> dict[K, list[H]]:
    groups: dict[K, list[H]] = defaultdict(list)
    for key, item in items:
        groups[key].append(item)
    return groups


def _overlaps[H, W](
    owned: Sequence[tuple[Box, H]], wanted: Sequence[tuple[Box, W]], dim: int = 0
) -> Iterator[tuple[H, W, Box]]:
    """All pairs of overlapping boxes of one tensor, with the box of their overlap.

    Takes about n + m steps for n and m boxes if they are cut along one dimension, or are slices of
    a stack, with extent 1 along the leading dimensions.
    """
    if not owned or not wanted:
        return
    is_stack = dim + 1 < len(owned[0][0].start) and all(
        box.size[dim] == 1 for box, _ in (*owned, *wanted)
    )
    if is_stack:
        slices = _grouped((box.start[dim], (box, have)) for box, have in owned)
        for index, some in _grouped((box.start[dim], (box, want)) for box, want in wanted).items():
            yield from _overlaps(slices[index], some, dim + 1)
        return
    owned = sorted(owned, key=lambda item: item[0].start[dim])
    first = 0
    for want_box, want in sorted(wanted, key=lambda item: item[0].start[dim]):
        # Later wanted boxes start no earlier: a box that ends here overlaps none of them.
        while first < len(owned) and owned[first][0].end[dim] <= want_box.start[dim]:
            first += 1
        for i in range(first, len(owned)):
            have_box, have = owned[i]
            if have_box.start[dim] >= want_box.end[dim]:
                break
            common = have_box.overlap(want_box)
            if common is not None:
                yield have, want, common


def cover_exactly(shapes: Mapping[str, Shape], layouts: Iterable[Layout]) -> None:
    """Raise ValueError, listing every fault, unless the layouts own each element exactly once.

    `shapes` are of the whole tensors. O(n log n) in the number n of pieces in all layouts.
    """
    owned = (piece for layout in layouts for piece in layout.pieces if not piece.is_replica)
    _check_cover(shapes, ((piece.tensor, piece.box) for piece in owned))


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
    """Number of elements that no box covers, and number that several boxes cover.

    Cuts dimension `dim` wherever a box begins or ends. Along each slab the active boxes do not
    change, so one dimension less remains. A = rows 0-1, B = rows 1-2, of 4 rows::

        row 0    A       one active box: covered
        row 1    A B     two: repeated
        row 2      B
        row 3            none: missing
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
