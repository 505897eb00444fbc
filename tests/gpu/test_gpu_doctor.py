"""The doctor's facts of real GPUs."""

import torch

from megatron_grpo.doctor.gpus import check_gpus, driver_version, find_gpus


def test_every_gpu_is_seen_with_driver_and_nccl():
    assert driver_version() is not None
    found = find_gpus()
    assert found is not None
    assert len(found.gpus) == torch.cuda.device_count()
    assert found.gpus[0].name == torch.cuda.get_device_name(0)
    assert found.nccl is not None and found.cuda == torch.version.cuda
    assert all(check.status != "missing" for check in check_gpus(found))
