"""Boxes in files: any box of a stored tensor is read and written as slicing would."""

import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from checkpoint_convert.safetensors_file import create_file, read_header
from checkpoint_convert.tensor_io import TORCH_DTYPES, read_box, write_box
from parallel import Box


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True))
    return shape, Box(start, size)


@settings(deadline=None)
@given(boxes(), st.sampled_from(sorted(TORCH_DTYPES)))
def test_a_box_is_written_and_read_where_slicing_puts_it(shape_and_box, dtype):
    shape, box = shape_and_box
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        create_file(path, {"before": (3,), "x": shape, "after": (2, 2)}, dtype)
        values = torch.rand(*reversed(box.size)).permute(*reversed(range(len(shape))))
        place = read_header(path)["x"]
        with path.open("r+b", buffering=0) as file:
            write_box(file.fileno(), place, box, values)  # not contiguous, and of another dtype
            stored = read_box(file.fileno(), place, box)
        expected = torch.zeros(shape, dtype=TORCH_DTYPES[dtype])
        expected[box.slices] = values.to(TORCH_DTYPES[dtype])
        assert torch.equal(stored, expected[box.slices])
        tensors = load_file(path)
        assert torch.equal(tensors["x"], expected)
        assert not tensors["before"].any()
        assert not tensors["after"].any()
