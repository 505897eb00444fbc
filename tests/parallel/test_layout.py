"""Layouts: copies between any two equal direct slicing, and gaps and overlaps are found."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel import Axes, Box, Layout, Shape, ShardMapping, cover_exactly, intersect

SHAPES = {"a": (12,), "b": (7, 10), "c": (4, 6, 5), "d": (1,)}


def as_whole(values: np.ndarray, axes: Axes) -> np.ndarray:
    """View a box of a local tensor with the dimensions of the whole tensor."""
    if not axes:
        return values
    whole_first = np.moveaxis(values, axes, range(len(axes)))
    return whole_first.reshape(whole_first.shape[: len(axes)], copy=False)


@st.composite
def tilings(draw, shape):
    """Boxes of any size that together partition a tensor of `shape`."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.size[dim]))
        lower, upper = list(box.size), list(box.size)
        start = list(box.start)
        lower[dim], upper[dim], start[dim] = cut, box.size[dim] - cut, box.start[dim] + cut
        halves = [Box(box.start, tuple(lower)), Box(tuple(start), tuple(upper))]
        boxes += [half for half in halves if half.num_elements]
    return boxes


@st.composite
def storages(draw, size: Shape) -> tuple[Shape, Box, Axes]:
    """A local tensor with room for a box of `size`, with dimensions in any order, stacked or not.

    There is a margin before the box along every dimension.
    """
    num_dims = len(size) + draw(st.integers(0, 2))
    axes = tuple(draw(st.permutations(range(num_dims))))[: len(size)]
    if axes == tuple(range(num_dims)) and draw(st.booleans()):
        axes = ()
    local_size = [1] * num_dims
    for dim, axis in enumerate(axes or range(num_dims)):
        local_size[axis] = size[dim]
    margin = draw(st.integers(0, 2))
    box = Box((margin,) * num_dims, tuple(local_size))
    return box.end, box, axes


@st.composite
def systems(draw, num_ranks=3):
    """Layouts of ranks that together own all of SHAPES; some also hold replicas."""
    shapes = [{} for _ in range(num_ranks)]
    pieces = [[] for _ in range(num_ranks)]
    for tensor, shape in SHAPES.items():
        for number, box in enumerate(draw(tilings(shape))):
            holders = draw(st.permutations(range(num_ranks)))[: draw(st.integers(1, 2))]
            for is_replica, rank in enumerate(holders):
                local = f"{tensor}.{number}"
                shapes[rank][local], local_box, axes = draw(storages(box.size))
                pieces[rank].append(
                    ShardMapping(local, local_box, tensor, box, bool(is_replica), axes)
                )
    return [Layout(s, tuple(p)) for s, p in zip(shapes, pieces, strict=True)]


def numbered(shapes: dict[str, Shape] = SHAPES) -> dict[str, np.ndarray]:
    """Whole tensors with distinct, nonzero elements."""
    sizes = np.cumsum([0, *map(np.prod, shapes.values())])
    return {
        name: np.arange(1 + start, 1 + end).reshape(shape)
        for (name, shape), start, end in zip(shapes.items(), sizes[:-1], sizes[1:], strict=True)
    }


def direct_slices(layout: Layout, wholes: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Local tensors: slices of `wholes`, 0 in the layout's zeros, -1 elsewhere."""
    tensors = {name: np.full(shape, -1) for name, shape in layout.shapes.items()}
    for piece in layout.pieces:
        target = as_whole(tensors[piece.local][piece.local_box.slices], piece.axes)
        target[:] = wholes[piece.tensor][piece.box.slices]
    for name, box in layout.zeros:
        tensors[name][box.slices] = 0
    return tensors


@given(systems(), systems())
def test_copies_between_two_systems_equal_direct_slicing(sources, destinations):
    held = [direct_slices(layout, numbered()) for layout in sources]
    for destination in destinations:
        received = {name: np.full(shape, -1) for name, shape in destination.shapes.items()}
        writes = {name: np.zeros(shape, int) for name, shape in destination.shapes.items()}
        for source, tensors in zip(sources, held, strict=True):
            for copy in intersect(source, destination):
                values = tensors[copy.source][copy.source_box.slices]
                target = received[copy.destination][copy.destination_box.slices]
                values = as_whole(values, copy.source_axes)
                as_whole(target, copy.destination_axes)[:] = values
                writes[copy.destination][copy.destination_box.slices] += 1
        expected = direct_slices(destination, numbered())
        assert received.keys() == expected.keys()
        for name, tensor in expected.items():
            np.testing.assert_array_equal(received[name], tensor)
            np.testing.assert_array_equal(writes[name], tensor >= 0)


@given(st.data(), st.sampled_from(list(SHAPES.values())), st.integers(1, 150))
def test_a_box_is_cut_into_runs_of_bounded_size(data, shape, max_elements):
    (whole,) = numbered({"t": shape}).values()
    for box in data.draw(tilings(shape)):
        parts = box.cut(max_elements)
        assert all(part.num_elements <= max_elements for part in parts)
        in_order = np.concatenate([whole[part.slices].ravel() for part in parts])
        np.testing.assert_array_equal(in_order, whole[box.slices].ravel())
        if box.num_elements <= max_elements:
            assert parts == [box]


def test_a_box_moves_as_its_origin_does():
    assert Box((5, 3), (2, 4)).moved((4, 1), (10, 0)) == Box((11, 2), (2, 4))


def test_whole_part_inverts_local_part_wherever_the_local_box_begins():
    mapping = ShardMapping("x", Box((2, 5), (4, 3)), "t", Box((7, 1), (3, 4)), axes=(1, 0))
    whole, local = Box((8, 2), (2, 1)), Box((3, 6), (1, 2))
    assert mapping.local_part(whole) == local
    assert mapping.whole_part(local) == whole


@st.composite
def keys(draw) -> tuple[dict[str, Shape], Layout]:
    """Whole tensors, and a layout of stacks of them with dimensions in any order.

    Slices of a stack may be owned, replicas, zeros, or not described at all. One dimension may end
    in a margin of zeros.
    """
    wholes, shapes, pieces, zeros = {}, {}, [], []
    for name, shape in SHAPES.items():
        stack, *axes = draw(st.permutations(range(len(shape) + 1)))
        padded, padding = draw(st.sampled_from(axes)), draw(st.integers(0, 2))
        kinds = draw(st.lists(st.sampled_from(["owned", "replica", "zeros", ""]), min_size=1))
        extents = dict(zip(axes, shape, strict=True)) | {stack: len(kinds)}
        stacked = Box.whole(tuple(extents[axis] for axis in range(len(extents))))
        for index, kind in enumerate(kinds):
            box, whole = stacked.narrowed(stack, index, 1), f"{name}{index}"
            wholes[whole] = shape
            if kind == "zeros":
                zeros.append((name, box))
            elif kind:
                is_replica = kind == "replica"
                piece = ShardMapping(name, box, whole, Box.whole(shape), is_replica, tuple(axes))
                pieces.append(piece)
        shapes[name] = stacked.narrowed(padded, 0, extents[padded] + padding).size
        if padding:
            zeros.append((name, stacked.narrowed(padded, extents[padded], padding)))
    return wholes, Layout(shapes, tuple(pieces), tuple(zeros))


@given(keys(), st.data())
def test_a_layout_through_another_equals_slicing_twice(outer, data):
    wholes, outer = outer
    shapes, pieces = {}, []
    for key, shape in outer.shapes.items():
        for number, box in enumerate(data.draw(tilings(shape))):
            shapes[f"{key}@{number}"], local_box, axes = data.draw(storages(box.size))
            is_replica = data.draw(st.booleans())
            pieces.append(ShardMapping(f"{key}@{number}", local_box, key, box, is_replica, axes))
    inner = Layout(shapes, tuple(pieces))

    def owned(layout: Layout) -> Layout:
        pieces = tuple(piece for piece in layout.pieces if not piece.is_replica)
        return replace(layout, pieces=pieces, zeros=())

    def sliced(layout: Layout) -> dict[str, np.ndarray]:
        return direct_slices(layout, numbered(wholes))

    def sliced_twice(inner: Layout, outer: Layout) -> dict[str, np.ndarray]:
        return direct_slices(inner, sliced(outer))

    through = inner.compose(outer)
    assert through.shapes == inner.shapes
    expected = sliced_twice(inner, outer)
    np.testing.assert_equal(sliced(through), expected)
    np.testing.assert_equal(sliced(owned(through)), sliced_twice(owned(inner), owned(outer)))
    boxes = [piece.box for piece in through.pieces] + [box for _, box in through.zeros]
    num_described = sum((tensor >= 0).sum() for tensor in expected.values())
    assert sum(box.num_elements for box in boxes) == num_described  # nothing is described twice


def test_a_transposed_tensor_stays_so_through_a_layout_that_renames_it():
    transposed = ShardMapping("local", Box.whole((2, 3)), "file", Box.whole((3, 2)), axes=(1, 0))
    renamed = ShardMapping("file", Box.whole((3, 2)), "model", Box.whole((3, 2)))
    through = Layout({"local": (2, 3)}, (transposed,)).compose(Layout({"file": (3, 2)}, (renamed,)))
    assert through.pieces == (replace(transposed, tensor="model"),)


def test_layouts_in_stacks_of_thousands_meet_in_linear_time():
    layers, experts = 94, 128
    stack = {"w": (layers, experts, 12, 8)}
    slices = [(layer, expert) for layer in range(layers) for expert in range(experts)]
    whole = Layout(
        stack,
        tuple(
            ShardMapping(
                "w", Box((*at, 0, 0), (1, 1, 12, 8)), f"{at}", Box.whole((12, 8)), axes=(2, 3)
            )
            for at in slices
        ),
    )
    chunks = {f"{at}.{row}": Box((*at, row, 0), (1, 1, 6, 8)) for at in slices for row in (0, 6)}
    chunked = Layout(
        {name: box.size for name, box in chunks.items()},
        tuple(ShardMapping(name, Box.whole(box.size), "w", box) for name, box in chunks.items()),
    )
    start = time.process_time()
    assert len(chunked.compose(whole).pieces) == len(chunks)
    assert len(intersect(chunked, Layout.of_whole_tensors(stack))) == len(chunks)
    cover_exactly(stack, [chunked])
    assert time.process_time() - start < 5.0


def test_layouts_cut_along_one_dimension_into_tens_of_thousands_meet_in_linear_time():
    rows = {"w": (160_000, 2)}
    cut = Layout.of_parts(rows, max_elements=4)
    start = time.process_time()
    assert len(intersect(cut, cut)) == 80_000
    assert time.process_time() - start < 8.0  # 4.2 on a busy machine; minutes if quadratic


@given(systems())
def test_a_system_that_owns_everything_once_is_accepted(layouts):
    cover_exactly(SHAPES, layouts)


@given(st.data())
def test_missing_and_repeated_elements_are_counted_per_tensor(data):
    boxes = {name: data.draw(tilings(shape)) for name, shape in SHAPES.items()}
    for name in boxes:
        kept = data.draw(st.lists(st.sampled_from(boxes[name]), max_size=8))
        boxes[name] = kept
    layout = Layout(
        SHAPES, tuple(ShardMapping(n, b, n, b) for n, some in boxes.items() for b in some)
    )
    faults = []
    for name, shape in SHAPES.items():
        count = np.zeros(shape, int)
        for box in boxes[name]:
            count[box.slices] += 1
        if (count == 0).any():
            faults.append(f"{name}: {(count == 0).sum()} of {count.size} elements are in no piece")
        if (count > 1).any():
            faults.append(
                f"{name}: {(count > 1).sum()} of {count.size} elements are in several pieces"
            )
    if not faults:
        cover_exactly(SHAPES, [layout])
        return
    with pytest.raises(ValueError) as error:
        cover_exactly(SHAPES, [layout])
    assert str(error.value).splitlines()[1:] == [f"  {fault}" for fault in faults]


def test_a_replica_covers_nothing_and_is_nobodys_source():
    whole = Layout.of_whole_tensors({"a": (4,)})
    replica = Layout({"a": (4,)}, tuple(replace(p, is_replica=True) for p in whole.pieces))
    cover_exactly({"a": (4,)}, [whole, replica])
    with pytest.raises(ValueError, match="a: 4 of 4 elements are in no piece"):
        cover_exactly({"a": (4,)}, [replica])
    assert intersect(replica, whole) == []
    assert len(intersect(whole, replica)) == 1


def test_a_piece_of_an_unknown_tensor_or_outside_its_tensor_is_named():
    layout = Layout.of_whole_tensors({"a": (4,), "b": (3, 5), "z": (1,)})
    with pytest.raises(ValueError) as error:
        cover_exactly({"a": (4,), "b": (3, 4)}, [layout])
    assert "z: there is no such tensor" in str(error.value)
    assert "b: Box(start=(0, 0), size=(3, 5)) is outside its shape (3, 4)" in str(error.value)
    assert "a:" not in str(error.value)


def test_a_local_tensor_must_be_described_once_by_pieces_and_zeros():
    box = Box((0, 0), (3, 2))
    piece = ShardMapping("x", box, "t", box)
    Layout({"x": (4, 2)}, (piece,), (("x", Box((3, 0), (1, 2))),)).check_complete()
    with pytest.raises(ValueError, match="x: 2 of 8 elements are in no piece"):
        Layout({"x": (4, 2)}, (piece,)).check_complete()
    with pytest.raises(ValueError, match="x: 2 of 8 elements are in several pieces"):
        Layout({"x": (4, 2)}, (piece,), (("x", Box((2, 0), (2, 2))),)).check_complete()


def test_other_local_tensors_than_the_layouts_are_a_programming_error():
    layout = Layout.of_whole_tensors({"a": (4,), "b": (2, 2)})
    layout.check_shapes({"b": (2, 2), "a": (4,)})
    with pytest.raises(AssertionError, match=r"'b': \(None, \(2, 2\)\)"):
        layout.check_shapes({"a": (4,)})
    with pytest.raises(AssertionError, match=r"'a': \(\(5,\), \(4,\)\)"):
        layout.check_shapes({"a": (5,), "b": (2, 2)})
