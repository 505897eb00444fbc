"""A range of a flattened tensor is a few boxes of the tensor, in the same order."""

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from parallel.flat_range import boxes_of_range


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), data=st.data())
def test_boxes_are_the_elements_of_the_range_in_order(shape, data):
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))
    values = np.arange(prod(shape)).reshape(shape)
    boxes = boxes_of_range(shape, start, stop)
    found = [values[box.slices].reshape(-1) for box in boxes]
    assert np.concatenate([*found, np.arange(0)]).tolist() == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1
