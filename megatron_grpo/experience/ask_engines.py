"""Requests of rank 0 to the engines, made collective so that all ranks can push weights again."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_grpo.launch.preemption import Preempted
from megatron_grpo.rollout import EnginesLost, EnginesOut

T = TypeVar("T")

ANSWERED, OUT, PREEMPTED, LOST = range(4)


def ask_engines(ask: Callable[[], T] | None, push: Callable[[], None]) -> T | None:
    """Return what `ask` returns on rank 0, and None on the other ranks.

    Collective over the default group; only rank 0 passes an `ask`, which must use engines that hold
    the current weights. If no engine serves any more, all ranks `push` the current weights, which
    waits for an engine to come back, and rank 0 asks again. The other ranks wait on the CPU: a GPU
    that waits in a collective is busy, and it may be the one that has to generate.

    Raises on all ranks: Preempted if rank 0 was told to stop, and EnginesLost if `ask` or `push`
    raises it.
    """
    while True:
        answer, outcome, lost = None, ANSWERED, EnginesLost("rank 0 says why generation ended")
        try:
            answer = ask() if ask else None
        except EnginesOut:
            outcome = OUT
        except Preempted:
            outcome = PREEMPTED
        except EnginesLost as error:
            outcome, lost = LOST, error
        told = torch.tensor([outcome])
        dist.broadcast(told, src=0)
        if told == PREEMPTED:
            raise Preempted("the generation was given up")
        if told == LOST:
            raise lost
        if told == ANSWERED:
            return answer
        push()
