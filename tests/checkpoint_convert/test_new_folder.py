"""Output folders appear only when they are complete."""

import os

import pytest

from checkpoint_convert.hf_to_megatron import import_checkpoint
from checkpoint_convert.megatron_to_hf import export_checkpoint
from checkpoint_convert.new_folder import new_folder
from helpers.models.conversions import file_size_limit
from parallel import ParallelDims


def test_new_folder_appears_with_its_parents_when_all_is_written(tmp_path):
    out = tmp_path / "a" / "b"
    with new_folder(out, 0) as folder:
        (folder / "file").write_text("text")
        assert folder == tmp_path / "a" / "b.partial"
        assert not out.exists()
    assert [path.name for path in out.parent.iterdir()] == ["b"]
    assert (out / "file").read_text() == "text"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_new_folder_leaves_nothing_after_an_error(tmp_path, error):
    with pytest.raises(error), new_folder(tmp_path / "out", 0) as folder:
        (folder / "file").write_text("text")
        raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["out", "out.partial"])
def test_new_folder_keeps_an_existing_folder(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"{name} exists: "), new_folder(tmp_path / "out", 0):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_new_folder_checks_free_space_before_it_writes(tmp_path):
    message = "bytes free, but the weights take 1,000,000,000,000,000,000"
    with pytest.raises(ValueError, match=message), new_folder(tmp_path / "out", 10**18):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_bytes", [500, 5000, 20_000, 200_000])
def test_new_folder_names_the_place_on_a_full_disk(model, tmp_path, num_bytes):
    """The disk fills in sidecar files, in checkpoint files without values yet, or in weights."""
    checkpoint = tmp_path / "checkpoint"
    import_checkpoint(model, checkpoint, ParallelDims())
    for convert in (
        lambda out: import_checkpoint(model, out, ParallelDims()),
        lambda out: export_checkpoint(checkpoint, out),
    ):
        with file_size_limit(num_bytes), pytest.raises(OSError) as error:
            convert(tmp_path / "out")
        assert str(tmp_path / "out.partial") in str(error.value)
        assert os.listdir(tmp_path) == ["checkpoint"]
