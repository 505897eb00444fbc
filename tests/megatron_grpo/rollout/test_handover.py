import os
import subprocess
from pathlib import Path

import pytest

from megatron_grpo.config_file import load_config
from megatron_grpo.rollout import handover
from megatron_grpo.rollout.handover import (
    check_handover,
    claim_folder,
    clear_abandoned_folders,
    handover_folder,
)
from runs import TINY_CONFIG


def config(tmp_path: Path, *overrides: str):
    return load_config(TINY_CONFIG, [f"train.run_dir={tmp_path / 'run'}", *overrides])


def test_a_run_has_a_folder_of_its_own_below_sync_dir(tmp_path):
    folder = handover_folder(config(tmp_path, f"rollout.sync_dir={tmp_path}"))
    assert folder.parent == tmp_path  # sync_dir itself, with whatever else is there, is not ours
    other = config(tmp_path / "other", f"rollout.sync_dir={tmp_path}")
    assert handover_folder(other) != folder


def test_too_little_space_is_told_before_the_start(tmp_path):
    with pytest.raises(ValueError, match=r"bytes free and new weights take .*rollout.sync_dir"):
        check_handover(config(tmp_path), num_bytes=10**18)
    check_handover(config(tmp_path), num_bytes=10**6)


def test_folders_of_dead_processes_are_cleared_and_those_of_living_ones_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(handover, "SHARED_MEMORY", tmp_path)
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead, alive = tmp_path / "megatron-grpo-dead", tmp_path / "megatron-grpo-alive"
    for folder in (dead, alive):
        folder.mkdir()
        claim_folder(folder)
    (dead / "owner").write_text(str(ended.pid))
    clear_abandoned_folders()
    assert [path.name for path in tmp_path.iterdir()] == ["megatron-grpo-alive"]
    assert (alive / "owner").read_text() == str(os.getpid())
