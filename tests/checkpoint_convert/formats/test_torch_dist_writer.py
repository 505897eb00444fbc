"""Checkpoints that we write: files before their values, chunks of any shape, gaps are reported."""

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpoint_convert.formats.torch_dist import read_chunks
from checkpoint_convert.formats.torch_dist_writer import (
    Chunk,
    create_chunks,
    finish_checkpoint,
    index_of,
)
from helpers.models.conversions import (
    assert_same,
    file_size_limit,
    read_checkpoint,
    write_checkpoint,
)
from parallel import Box

TENSORS = {
    "a.weight": torch.randn(3, 17, 5),
    "b.weight": torch.randn(40, 6).bfloat16(),
    "c.weight": torch.randn(3, 4, 5, 2, dtype=torch.float64),
    "d.weight": torch.randn(11).half(),
}


def chunks_of_rows(num_rows: int, num_chunks: int) -> list[Chunk]:
    """`num_chunks` chunks of `num_rows` rows each, stacked to one tensor."""
    shape = (num_rows * num_chunks, 64)
    boxes = [Box((number * num_rows, 0), (num_rows, 64)) for number in range(num_chunks)]
    return [Chunk("w", box, shape, "F32") for box in boxes]


@pytest.mark.parametrize("max_elements", [20, 1 << 20])
@pytest.mark.parametrize("num_files", [1, 3])
def test_finish_checkpoint_is_read_by_torch(tmp_path, num_files, max_elements):
    write_checkpoint(tmp_path, TENSORS, num_files=num_files, max_elements=max_elements)
    assert_same(read_checkpoint(tmp_path), TENSORS)
    found = {name: torch.empty_like(value) for name, value in TENSORS.items()}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert_same(found, TENSORS)


def test_create_chunks_takes_no_disk_space_yet(tmp_path):
    created = create_chunks(tmp_path, [chunks_of_rows(1 << 16, 2)])  # 16 MiB each
    file = tmp_path / "__0_0.distcp"
    end = created[-1].offset + created[-1].length
    assert file.stat().st_size == end
    assert 32 << 20 <= end < (32 << 20) + 10_000
    assert file.stat().st_blocks * 512 < 1 << 20
    assert [each.place.num_bytes for each in created] == [16 << 20, 16 << 20]


def test_index_of_refuses_chunks_with_gaps(tmp_path):
    chunk = Chunk("w", Box((0, 0), (2, 4)), (3, 4), "F32")
    created = create_chunks(tmp_path, [[chunk]])
    with pytest.raises(ValueError, match="w: 4 of 12 elements are in no piece"):
        index_of(created)


def test_index_of_lists_empty_objects(tmp_path):
    names = [f"decoder.layers.mlp.linear_fc1._extra_state/shard_{i}_50" for i in range(50)]
    write_checkpoint(tmp_path, TENSORS, empty_objects=names)
    listed = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert listed.keys() == {*TENSORS, *names}
    assert read_chunks(tmp_path).shapes.keys() == TENSORS.keys()
    (nothing,) = tmp_path.glob("__empty*.distcp")
    assert torch.load(nothing, weights_only=True) == [None]


def test_finish_checkpoint_on_a_full_disk(tmp_path):
    created = create_chunks(tmp_path, [chunks_of_rows(1, 100)])
    with file_size_limit(2000), pytest.raises(OSError):
        finish_checkpoint(tmp_path, index_of(created))
    assert os.path.getsize(tmp_path / ".metadata") <= 2000
    assert not (tmp_path / "metadata.json").exists()
