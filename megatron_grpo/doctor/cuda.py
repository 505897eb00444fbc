"""The GPUs of this host as torch sees them. Imports torch, so used only if there is a driver."""

import torch

from megatron_grpo.doctor.gpus import Gpu, Gpus


def read_gpus(driver: str) -> Gpus:
    """All GPUs visible to this process, and which pairs lack peer access."""
    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    return Gpus(
        driver=driver,
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if count else None,
        gpus=tuple(Gpu(one.name, one.total_memory, (one.major, one.minor)) for one in properties),
        without_peer_access=tuple(
            pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)
        ),
    )
