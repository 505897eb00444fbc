"""Options for pyxis in the scripts; it cannot run here, so `srun` and `scontrol` are fakes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.runs.slurm_cluster import REPOSITORY
from helpers.runs.train import TINY_CONFIG

SRUN = """#!/usr/bin/env bash
echo "PYTHONSAFEPATH=$PYTHONSAFEPATH srun ${*//$'\\n'/ }" >>"$CALLS"
while [[ $1 == --* ]]; do shift; done
[[ $2 != place ]] || exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
    "show hostnames") echo n0 ;;
    "show node") echo NodeAddr=127.0.0.1 ;;
esac
"""


@pytest.fixture
def calls(tmp_path):
    """A function: run the tiny config's job with a run directory; returns each call of `srun`."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (tmp_path / "tokenizer.json").touch()
    given = [f"model.path={tmp_path}", f"data.path={tmp_path}"]
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def calls(run_dir: Path) -> list[str]:
        environment = os.environ | {
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "CALLS": str(tmp_path / "calls"),
            "CONFIG": str(TINY_CONFIG),
            "CONTAINER_IMAGE": "/images/grpo.sqsh",
            "SLURM_SUBMIT_DIR": str(REPOSITORY),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n0",
        }
        script = ["bash", "slurm/grpo_8b.sh", f"train.run_dir={run_dir}", *given]
        subprocess.run(script, cwd=REPOSITORY, env=environment, timeout=60)
        return (tmp_path / "calls").read_text().splitlines()

    return calls


def test_a_container_sees_the_run_directory_wherever_it_is(calls, tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "scratch")
    _, trainer = calls(tmp_path / "link" / "run")
    there = tmp_path / "scratch" / "run"
    mounts = f"{REPOSITORY},{there},{there}:{tmp_path}/link/run"
    assert f" --container-mounts={mounts} " in trainer
    assert there.is_dir()


def test_all_steps_run_in_the_image(calls, tmp_path):
    for call in calls(tmp_path / "run"):
        assert call.startswith("PYTHONSAFEPATH=1 ")
        assert " --container-image=/images/grpo.sqsh " in call
