"""What rank 0 asks of the engines, as something that all ranks do: together they push again."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_grpo.launch.preemption import Preempted
from megatron_grpo.rollout import EnginesLost, EnginesOut

T = TypeVar("T")

ANSWERED, OUT, PREEMPTED, LOST = range(4)


def ask_engines(ask: Callable[[], T] | None, push: Callable[[], None]) -> T | None:
    """What `ask` returns on rank 0, from engines that hold the current weights; None elsewhere.

    Collective over the default group; only rank 0 has something to `ask`. When it finds that no
    engine serves any more, all ranks `push` the current weights, which waits for an engine to come
    back, and rank 0 asks again. The others wait on the CPU: a GPU that waits for a collective is
    busy, and may be the one that is to generate.

    Raises on all ranks: Preempted, where rank 0 was told to end, and EnginesLost, where `ask` or
    `push` raises it.
    """
    while True:
        answer, outcome, lost = None, ANSWERED, EnginesLost("rank 0 has lost them")
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
