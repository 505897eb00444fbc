"""What GPUs have held at most, so that a plan can be checked by a run."""

import torch
import torch.distributed as dist


def peak_memory(device: torch.device) -> dict[str, float]:
    """Metrics of the fullest GPU since the last call, in GB of 1e9 bytes, on every rank.

    Of torch's allocator: what tensors took, and what it had of the GPU for them. Collective;
    nothing without CUDA, where neither is known.
    """
    if device.type != "cuda":
        return {}
    taken = [torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)]
    torch.cuda.reset_peak_memory_stats(device)
    peaks = torch.tensor(taken, dtype=torch.float64)
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    allocated, reserved = (peaks / 1e9).tolist()
    return {"perf/max_memory_allocated_gb": allocated, "perf/max_memory_reserved_gb": reserved}
