"""Peak GPU memory, so that a plan can be checked against a run."""

import torch
import torch.distributed as dist


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peak memory since the last call, in GB (1e9 bytes): the maximum over all ranks.

    From torch's allocator: memory allocated to tensors, and memory reserved from the GPU.
    Collective; empty without CUDA.
    """
    if device.type != "cuda":
        return {}
    taken = [torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)]
    torch.cuda.reset_peak_memory_stats(device)
    peaks = torch.tensor(taken, dtype=torch.float64)
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    allocated, reserved = (peaks / 1e9).tolist()
    return {"perf/max_memory_allocated_gb": allocated, "perf/max_memory_reserved_gb": reserved}
