"""Rows are read once for all their columns."""

from dataclasses import replace

import numpy as np
import pytest

from checkpoint_convert import read_shape
from checkpoint_convert.formats.tensor_io import TensorSource
from checkpoint_convert.weights import RowCache, open_weights
from helpers.models import tiny_model
from parallel import Box

NAME = "model.layers.0.mlp.down_proj.weight"


class Counted(TensorSource):
    """Records the boxes that are read from another source."""

    def __init__(self, source):
        self.source, self.dtypes, self.boxes = source, source.dtypes, []

    def read_into(self, name, box, target):
        self.boxes.append(box)
        self.source.read_into(name, box, target)

    def close(self):
        self.source.close()


@pytest.fixture
def weights(tmp_path):
    model = tiny_model(tmp_path / "model", "llama")
    opened = open_weights(model, read_shape(model))
    yield replace(opened, tensors=Counted(opened.tensors))
    opened.close()


def columns(first, last, rows=(3, 9)):
    return Box((rows[0], first), (rows[1] - rows[0], last - first))


def test_columns_are_read_with_their_neighbours_once(weights):
    (num_rows, num_columns) = weights.layout.shapes[NAME]
    whole = weights.tensors.read(NAME, Box.whole((num_rows, num_columns)))
    source = RowCache(weights)
    weights.tensors.boxes.clear()
    for rows in ((3, 9), (9, 10), (0, num_rows), (3, 9)):
        for first, last in ((0, 7), (7, 50), (50, num_columns)):
            box = columns(first, last, rows)
            assert np.array_equal(source.read(NAME, box), whole[box.slices])
    assert [box.size for box in weights.tensors.boxes] == [
        (count, num_columns) for count in (6, 1, num_rows, 6)
    ]


@pytest.mark.parametrize("last_column", [7, None])
def test_whole_rows_and_rows_too_large_to_be_kept_are_read_as_they_are(
    weights, monkeypatch, last_column
):
    if last_column:
        monkeypatch.setattr("checkpoint_convert.weights._MAX_BYTES", 100)
    box = columns(0, last_column or weights.layout.shapes[NAME][1])
    expected = weights.tensors.read(NAME, box)
    assert np.array_equal(RowCache(weights).read(NAME, box), expected)
    assert weights.tensors.boxes == [box, box]


def test_a_failed_read_is_not_taken_for_rows(weights, monkeypatch):
    source = RowCache(weights)
    expected = source.read(NAME, columns(0, 7))
    other = columns(0, 7, rows=(10, 16))

    def fail(name, box, target):
        raise OSError("no such bytes")

    with monkeypatch.context() as patch:
        patch.setattr(weights.tensors, "read_into", fail)
        for _ in range(2):
            with pytest.raises(OSError):
                source.read(NAME, other)
    assert np.array_equal(source.read(NAME, columns(0, 7)), expected)
