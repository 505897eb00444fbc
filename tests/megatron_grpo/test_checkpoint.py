from pathlib import Path

import pytest

from megatron_grpo.checkpoint import _drop_others, latest_step


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir()


def test_the_newest_checkpoints_stay(tmp_path):
    make(tmp_path, "step_5", "step_10", "step_100", "step_100.partial", "step_10.bak")
    _drop_others(tmp_path, step=100, keep=2)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"step_10", "step_100", "step_100.partial", "step_10.bak"}


def test_what_a_run_wrote_before_it_went_back_is_dropped_and_not_what_it_writes_now(tmp_path):
    make(tmp_path, "step_5", "step_20", "step_30")
    _drop_others(tmp_path, step=5, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_5"]


def test_a_pointer_to_nothing_says_what_to_do(tmp_path):
    assert latest_step(tmp_path) == 0
    (tmp_path / "LATEST").write_text("step_7\n")
    with pytest.raises(ValueError, match="names step_7, which is not in"):
        latest_step(tmp_path)
    make(tmp_path, "step_7")
    assert latest_step(tmp_path) == 7
