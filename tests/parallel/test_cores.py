import os
from types import SimpleNamespace

import pytest
import torch

from parallel import cores
from parallel.cores import cores_at, run_near


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-3,8-11\n", {0, 1, 2, 3, 8, 9, 10, 11}), ("5\n", {5}), ("\n", set())],
)
def test_the_kernel_tells_the_cores_at_a_device(tmp_path, text, expected):
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "local_cpulist").write_text(text)
    assert cores_at("0000:1b:00.0", tmp_path) == expected
    assert cores_at("0000:00:00.0", tmp_path) == set()


def test_a_rank_runs_on_those_of_its_cores_that_are_at_its_gpu(monkeypatch):
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    before = os.sched_getaffinity(0)
    one = min(before)
    found = {"0000:1b:00.0": {one, 4095}}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(cores, "cores_at", found.__getitem__)
    try:
        run_near(torch.device("cuda"))
        assert os.sched_getaffinity(0) == {one}
        os.sched_setaffinity(0, before)
        found["0000:1b:00.0"] = {4095}  # none of them is this job's
        run_near(torch.device("cuda"))
        assert os.sched_getaffinity(0) == before
    finally:
        os.sched_setaffinity(0, before)
