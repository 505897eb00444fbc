"""All ranks stop at the same step."""

import torch
import torch.distributed as dist


def agree_to_stop(is_preempted: bool, device: torch.device) -> bool:
    """Whether `is_preempted` on any rank; collective over the default group.

    Ranks hear of a signal at different moments: without this, one would stop a step before another.
    """
    told = torch.tensor(int(is_preempted), device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told)
