"""What functions of slurm/job.sh decide, in milliseconds: Slurm's commands are stand-ins."""

import os
import subprocess

import pytest

from slurm_cluster import REPOSITORY

SOURCED = "source slurm/job.sh; NETWORK_INTERFACE=${NETWORK_INTERFACE:-};"


@pytest.fixture
def bash(tmp_path):
    """Runs a script behind `source slurm/job.sh`, with programs in the place of those of PATH."""

    def bash(
        script: str, programs: dict[str, str], **variables: str
    ) -> subprocess.CompletedProcess:
        folder = tmp_path / "programs"
        folder.mkdir()
        for name, text in programs.items():
            (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
            (folder / name).chmod(0o755)
        environment = os.environ | {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(REPOSITORY),
            "SLURM_JOB_ID": "7",
        }
        return subprocess.run(
            ["bash", "-c", SOURCED + script],
            cwd=REPOSITORY,
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=30,
        )

    return bash


CONCLUDE = """
    LOGS="" RUN_DIR="" GUARD="" was_cancelled="" ENDS=$FOLDER/ends
    code=$CODE
    conclude
"""


@pytest.mark.parametrize(
    ("code", "starts_before", "is_queued"),
    [("0", "0", False), ("1", "0", True), ("75", "0", True), ("2", "0", False), ("2", "1", True)],
)
def test_a_mistake_is_final_on_the_first_start_alone(
    bash, tmp_path, code, starts_before, is_queued
):
    """Later what ends with code 2 has worked before: it may be a file system that is away."""
    done = bash(
        CONCLUDE,
        {"scontrol": 'echo "$*"'},
        FOLDER=str(tmp_path),
        CODE=code,
        SLURM_RESTART_COUNT=starts_before,
    )
    assert done.stdout == ("requeue 7\n" if is_queued else "")
    assert done.returncode == (0 if is_queued else int(code))
