"""Boxes in files: any box of a stored tensor is read and written as by slicing."""

import tempfile
from contextlib import closing
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from checkpoint_convert.formats.safetensors_file import create_file, read_header
from checkpoint_convert.formats.tensor_io import StoredTensors, read_box, write_box
from checkpoint_convert.formats.torch_dtypes import DTYPES
from helpers.models.conversions import read_tensor
from parallel import Box


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True))
    return shape, Box(start, size)


@given(boxes(), st.sampled_from(sorted(DTYPES)))
def test_write_box_and_read_box_are_slicing(shape_and_box, dtype):
    shape, box = shape_and_box
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        shapes = {"before": (3,), "x": shape, "after": (2, 2)}
        create_file(path, {name: (dtype, size) for name, size in shapes.items()})
        values = torch.rand(*reversed(box.size)).permute(*reversed(range(len(shape))))
        values = values.to(DTYPES[dtype])
        place = read_header(path)["x"]
        with path.open("r+b", buffering=0) as file:
            write_box(file.fileno(), place, box, values)  # not contiguous
            around = torch.zeros([n + 2 for n in box.size], dtype=DTYPES[dtype])
            inner = around[(slice(1, -1),) * around.dim()]
            read_box(file.fileno(), place, box, inner)  # not contiguous either
            found = torch.empty(box.size, dtype=DTYPES[dtype])
            read_box(file.fileno(), place, box, found)
        expected = torch.zeros(shape, dtype=DTYPES[dtype])
        expected[box.slices] = values
        assert torch.equal(found, values)
        assert torch.equal(inner, values)
        inner[...] = 0
        assert not around.any()
        tensors = load_file(path)
        assert torch.equal(tensors["x"], expected)
        assert not tensors["before"].any()
        assert not tensors["after"].any()


def test_stored_tensors_reads_more_files_than_may_be_open(tmp_path, monkeypatch):
    monkeypatch.setattr("checkpoint_convert.formats.tensor_io._MAX_OPEN_FILES", 2)
    values = {f"x{i}": torch.randn(3, 4) for i in range(5)}
    places = {}
    for name, value in values.items():
        save_file({name: value}, tmp_path / name)
        places |= read_header(tmp_path / name)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with closing(StoredTensors(places)) as tensors:
        for _ in range(2):
            for name, value in values.items():
                assert torch.equal(read_tensor(tensors, name, Box((1, 0), (2, 4))), value[1:])
        assert len(list(Path("/proc/self/fd").iterdir())) == before + 2
    assert len(list(Path("/proc/self/fd").iterdir())) == before
