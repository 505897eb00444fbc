"""What the doctor reads from real GPUs."""

import pytest
import torch

from megatron_grpo.doctor.gpus import driver_version, judge_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def test_every_gpu_is_seen_with_driver_and_nccl():
    from megatron_grpo.doctor.gpus import read_gpus

    driver = driver_version()
    assert driver is not None
    found = read_gpus(driver)
    assert len(found.gpus) == torch.cuda.device_count()
    assert found.gpus[0].name == torch.cuda.get_device_name(0)
    assert found.nccl is not None and found.cuda == torch.version.cuda
    assert all(finding.status != "missing" for finding in judge_gpus(found))
