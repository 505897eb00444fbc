"""The file system of the run directory: measured for real, judged from planted speeds."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_grpo.doctor.finding import can_train
from megatron_grpo.doctor.host import Storage, judge_storage, measure_storage

FAST = Storage("lustre", free=1e15, written=2e9, read=4e9)


def test_a_measurement_takes_seconds_and_leaves_nothing(tmp_path):
    start = time.monotonic()
    storage = measure_storage(tmp_path / "not" / "there" / "yet")
    assert time.monotonic() - start < 20
    assert list(tmp_path.iterdir()) == []
    assert storage.written > 0 and storage.read > 0 and storage.free > 0


def test_a_folder_that_cannot_be_written_is_an_error():
    with pytest.raises(OSError):
        measure_storage(Path("/proc/run"))


@pytest.mark.parametrize(
    ("change", "name"), [({"written": 20e6}, "run directory"), ({"free": 1e9}, "free space")]
)
def test_a_slow_or_full_disk_is_a_warning(change, name):
    assert all(finding.status == "ok" for finding in judge_storage(FAST))
    findings = {one.name: one for one in judge_storage(replace(FAST, **change))}
    assert findings[name].status == "warning"
    assert "train.run_dir" in findings[name].remedy


def test_locks_that_other_hosts_do_not_see_are_an_error():
    findings = list(judge_storage(replace(FAST, local_locks="localflock")))
    assert not can_train(findings)
    assert "localflock" in findings[-1].value and "-o flock" in findings[-1].remedy
