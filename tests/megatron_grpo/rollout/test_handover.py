import subprocess
import sys
from pathlib import Path

import pytest

from megatron_grpo.config_file import load_config
from megatron_grpo.rollout import handover
from megatron_grpo.rollout.handover import (
    check_handover,
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


CLAIM = """
import sys, time
from pathlib import Path
from megatron_grpo.rollout.handover import claim_folder
claim = claim_folder(Path(sys.argv[1]))
print("claimed", flush=True)
time.sleep(60)
"""


def test_folders_of_killed_processes_are_cleared_and_those_of_living_ones_kept(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(handover, "SHARED_MEMORY", tmp_path)
    folder = tmp_path / "megatron-grpo-folder"
    folder.mkdir()
    command = [sys.executable, "-c", CLAIM, str(folder)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline() == "claimed\n"
        clear_abandoned_folders()
        assert folder.exists()
    finally:
        owner.kill()
        owner.communicate()
    clear_abandoned_folders()
    assert not folder.exists()
