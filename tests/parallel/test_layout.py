"""Layouts: copies between any two of them equal direct slicing; every fault of a cover is found."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel import Box, Layout, Piece, cover_exactly, intersect

SHAPES = {"a": (12,), "b": (7, 10), "c": (4, 6, 5)}


@st.composite
def tilings(draw, shape):
    """Boxes that cut a tensor of `shape` into parts, along any dimension, of any size."""
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
def systems(draw, num_ranks=3):
    """Layouts of ranks that together own SHAPES; some also hold replicas, all have margins."""
    shapes = [{} for _ in range(num_ranks)]
    pieces = [[] for _ in range(num_ranks)]
    for tensor, shape in SHAPES.items():
        for number, box in enumerate(draw(tilings(shape))):
            holders = draw(st.permutations(range(num_ranks)))[: draw(st.integers(1, 2))]
            for is_replica, rank in enumerate(holders):
                margin = draw(st.integers(0, 2))
                local = f"{tensor}.{number}"
                shapes[rank][local] = tuple(n + margin for n in box.size)
                local_box = Box((margin,) * len(shape), box.size)
                pieces[rank].append(Piece(local, local_box, tensor, box, bool(is_replica)))
    return [Layout(s, tuple(p)) for s, p in zip(shapes, pieces, strict=True)]


def numbered() -> dict[str, np.ndarray]:
    return {name: np.arange(np.prod(shape)).reshape(shape) for name, shape in SHAPES.items()}


def direct_slices(layout: Layout) -> dict[str, np.ndarray]:
    tensors, wholes = {n: np.full(s, -1) for n, s in layout.shapes.items()}, numbered()
    for piece in layout.pieces:
        tensors[piece.local][piece.local_box.slices] = wholes[piece.tensor][piece.box.slices]
    return tensors


@given(systems(), systems())
def test_copies_between_two_systems_equal_direct_slicing(sources, destinations):
    held = [direct_slices(layout) for layout in sources]
    for destination in destinations:
        received = {name: np.full(shape, -1) for name, shape in destination.shapes.items()}
        writes = {name: np.zeros(shape, int) for name, shape in destination.shapes.items()}
        for source, tensors in zip(sources, held, strict=True):
            for copy in intersect(source, destination):
                values = tensors[copy.source][copy.source_box.slices]
                received[copy.destination][copy.destination_box.slices] = values
                writes[copy.destination][copy.destination_box.slices] += 1
        expected = direct_slices(destination)
        assert received.keys() == expected.keys()
        for name, tensor in expected.items():
            np.testing.assert_array_equal(received[name], tensor)
            np.testing.assert_array_equal(writes[name], tensor >= 0)


@given(systems())
def test_a_system_that_owns_everything_once_is_accepted(layouts):
    cover_exactly(SHAPES, layouts)


@given(st.data())
def test_missing_and_repeated_elements_are_counted_per_tensor(data):
    boxes = {name: data.draw(tilings(shape)) for name, shape in SHAPES.items()}
    for name in boxes:
        kept = data.draw(st.lists(st.sampled_from(boxes[name]), max_size=8))
        boxes[name] = kept
    layout = Layout(SHAPES, tuple(Piece(n, b, n, b) for n, some in boxes.items() for b in some))
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
    piece = Piece("x", box, "t", box)
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
