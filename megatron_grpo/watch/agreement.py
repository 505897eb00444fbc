"""Agreement of all ranks to stop at the same step."""

import torch
import torch.distributed as dist


def agree_to_stop(is_preempted: bool, device: torch.device) -> bool:
    """Whether `is_preempted` is true on any rank; collective over the default group.

    Ranks learn of a signal at different times: without this, one might stop a step before another.
    """
    told = torch.tensor(int(is_preempted), device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told)
