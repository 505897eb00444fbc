"""torch_dist checkpoints of Megatron-Core: read bit for bit, and no code in them runs."""

import os
import pickle
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from checkpoint_convert.formats import is_torch_dist
from checkpoint_convert.formats.torch_dist import read_chunks
from helpers.models.conversions import (
    Touch,
    assert_same,
    edit_metadata,
    read_checkpoint,
    read_tensor,
    write_checkpoint,
)
from helpers.models.tiny import tiny_model
from helpers.ranks.processes import run_ranks
from parallel import Box, ParallelDims


def save_trained(rank, model, folder):
    """Save a checkpoint as the trainer does, with optimizer state."""
    from helpers.oracle.policies import save_checkpoint, start_policy

    dims = ParallelDims(tensor=2, pipeline=2)
    policy, _ = start_policy(rank, model, dims)
    save_checkpoint(folder, 1, policy, model, dims)


def load_whole(rank, folder):
    """All whole tensors of a checkpoint, read by Megatron-Core."""
    from megatron.core.dist_checkpointing import load_plain_tensors

    from parallel.cpu_device import setup_device

    setup_device(rank)
    return {key: value for key, value in load_plain_tensors(str(folder)).items() if "." in key}


def test_read_chunks_of_megatron_is_bitwise(tmp_path):
    run_ranks(4, save_trained, tiny_model(tmp_path / "model", "qwen3"), tmp_path)
    trained = tmp_path / "checkpoints" / "step_1"
    (whole,) = run_ranks(1, load_whole, trained)

    def is_number(key):  # random states are plain bytes
        return key != "rng_state"

    stored = read_chunks(trained, is_number)
    assert "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2" not in stored.shapes  # an object
    assert "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight" in stored.shapes
    assert_same(read_checkpoint(trained, is_number), whole)


def test_read_chunks_gives_any_box(tmp_path):
    value = torch.randn(2, 9, 7)
    stored = read_chunks(write_checkpoint(tmp_path, {"w": value}, max_elements=40))
    (first, *_) = stored.layout.pieces
    assert first.local == "w@0.0.0"
    assert first.box == Box((0, 0, 0), (1, 5, 7))
    found = read_tensor(stored.tensors, "w@0.0.0", Box((0, 2, 3), (1, 3, 2)))
    assert torch.equal(found, value[:1, 2:5, 3:5])


# Faults of a folder are reported before any of its chunks is read.

TENSORS = {"decoder.w": torch.randn(8, 4), "optimizer.w": torch.randn(8, 4)}


@pytest.fixture
def written(tmp_path):
    return write_checkpoint(tmp_path / "checkpoint", TENSORS, num_files=2, max_elements=16)


def refusal(folder) -> str:
    with pytest.raises(ValueError) as error:
        read_chunks(folder)
    return str(error.value)


@pytest.mark.parametrize("name", [".metadata", "metadata.json"])
def test_read_chunks_refuses_an_unfinished_checkpoint(written, name):
    (written / name).unlink()
    assert is_torch_dist(written)
    assert f"has no {name}: it is not a complete torch_dist checkpoint" in refusal(written)


def test_read_chunks_names_another_format(written):
    (written / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert "in the format 'zarr', not 'torch_dist'" in refusal(written)


def test_check_files_names_a_missing_file(tmp_path):
    write_checkpoint(tmp_path, TENSORS, num_files=2)  # each in a file of its own
    (tmp_path / "__1_0.distcp").unlink()
    found = read_checkpoint(tmp_path, lambda key: key == "decoder.w")
    assert_same(found, {"decoder.w": TENSORS["decoder.w"]})
    stored = read_chunks(tmp_path)
    with pytest.raises(ValueError, match=r"__1_0\.distcp is not there"):
        stored.tensors.check_files()
    with pytest.raises(FileNotFoundError, match=r"__1_0\.distcp"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, -1])
def test_check_files_names_a_truncated_file(written, keep):
    file = written / "__1_0.distcp"
    size = file.stat().st_size
    os.truncate(file, keep % size)
    cut_off = rf"__1_0\.distcp has {keep % size} of "
    with pytest.raises(ValueError, match=rf"{cut_off}{size} bytes: was it"):
        read_chunks(written).tensors.check_files()
    with pytest.raises(ValueError, match=rf"{cut_off}\d+ bytes: was it"):
        read_checkpoint(written)


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        *(
            ("relative_path", file, f"decoder.w is in a file outside the folder: {file}")
            for file in ("../stolen.distcp", "..")
        ),
        ("offset", 1.5, "are not valid sizes"),
        ("length", -1, "are not valid sizes"),
        ("length", 1 << 62, "was it truncated?"),
        ("transform_descriptors", ["zstd"], "stored with transforms: ['zstd']"),
    ],
)
def test_read_chunks_refuses_impossible_places(written, field, value, fault):
    def change(metadata):
        for place in metadata.storage_data.values():
            setattr(place, field, value)

    edit_metadata(written, change)
    with pytest.raises(ValueError, match=re.escape(fault)) as error:
        read_checkpoint(written)
    assert str(written) in str(error.value)


def test_read_chunks_names_another_dtype(tmp_path):
    tensors = {"a": torch.ones(2, dtype=torch.int8), "b": torch.ones(2)}
    dcp.save(tensors, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert "a has dtype int8, supported: " in refusal(tmp_path)
    assert_same(read_checkpoint(tmp_path, lambda key: key == "b"), {"b": torch.ones(2)})


@pytest.mark.parametrize("keep", [0, 400])
def test_read_chunks_refuses_truncated_metadata(written, keep):
    path = written / ".metadata"
    path.write_bytes(path.read_bytes()[:keep])
    assert f"{path} is not the metadata of a checkpoint" in refusal(written)


def test_read_refuses_a_chunk_of_another_dtype(written):
    def change(metadata):
        metadata.state_dict_metadata["optimizer.w"].properties.dtype = torch.bfloat16

    edit_metadata(written, change)
    tensors = read_chunks(written).tensors
    with pytest.raises(ValueError, match=r"holds F32 \[4, 4\], not optimizer.w@0.0 as BF16"):
        read_tensor(tensors, "optimizer.w@0.0", Box((0, 0), (4, 4)))


# A pickle can call anything; none of these calls may run.


@pytest.fixture
def canary(tmp_path):
    path = tmp_path / "canary"
    pickle.loads(pickle.dumps(Touch(path)))
    assert path.exists(), "the attack does not work"
    path.unlink()
    yield path
    assert not path.exists()


def test_read_chunks_names_calls_in_metadata(written, canary):
    edit_metadata(written, lambda metadata: setattr(metadata, "planner_data", [Touch(canary)]))
    assert "io.open, which is not allowed" in refusal(written)
    (written / ".metadata").write_bytes(pickle.dumps(Touch(canary)))
    assert "io.open, which is not allowed" in refusal(written)


def text(value: str) -> bytes:
    """The pickle opcode for a string."""
    return b"\x8c" + bytes([len(value)]) + value.encode()


def name_of(module: str, attribute: str) -> bytes:
    """The pickle opcodes that look up a name."""
    return text(module) + text(attribute) + b"\x93"


@pytest.mark.parametrize(
    "name",
    [
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("megatron.core.dist_checkpointing.strategies.torch", "pickle"),
    ],
    ids=".".join,
)
def test_read_chunks_knows_only_classes_of_metadata(written, name):
    (written / ".metadata").write_bytes(b"\x80\x04" + name_of(*name) + b")R.")
    assert f"its pickle requires {'.'.join(name)}" in refusal(written)


def test_read_chunks_changes_no_class_of_torch(written):
    # The state (None, {"offset": 7}) sets attributes, here on the class itself.
    name = name_of("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    attack = b"\x80\x04" + name + b"N}" + text("offset") + b"K\x07s\x86b."
    pickle.loads(attack)
    assert _StorageInfo.offset == 7, "the attack does not work"
    del _StorageInfo.offset
    (written / ".metadata").write_bytes(attack)
    refusal(written)
    assert not hasattr(_StorageInfo, "offset")


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_read_chunks_of_every_pickle_protocol(written, protocol):
    path = written / ".metadata"
    path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes()), protocol))
    assert_same(read_checkpoint(written), TENSORS)


def test_read_chunks_reads_no_other_pickle(written, canary):
    torch.save({"args": Touch(canary)}, written / "common.pt")
    assert_same(read_checkpoint(written), TENSORS)
