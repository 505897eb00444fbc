"""Stacks of the main threads of ranks, and which of them differ from the others."""

import re
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Mapping

FRAME = re.compile(r'File "(.*)", line \d+, in (.*)')
WAITS = re.compile(r"/torch/(distributed|cuda)/|/pipeline_parallel/p2p_communication\.py")
"""Where a rank waits for others: in torch.distributed, in Megatron-Core's own waits for pipeline
sends and receives, or, with NCCL, where the host next synchronizes with the device."""


def main_stack() -> str:
    """The stack of this process's main thread, innermost call last as in a traceback."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return "".join(traceback.format_stack(frame)).rstrip()


def odd_ones_out(stacks: Mapping[int, str], progress: Mapping[int, tuple[int, int]]) -> list[int]:
    """The ranks that the others wait for, as far as stacks and progress show; else none.

    `progress` increases as a rank advances. If most ranks wait for others in a collective, the ones
    that do not are the cause. Otherwise it is those that lag behind, or else those that are at a
    different place than most.
    """
    busy = [rank for rank, stack in stacks.items() if not WAITS.search(stack)]
    if busy and 2 * len(busy) <= len(stacks):
        return busy
    last = min(progress.values())
    behind = [rank for rank in stacks if progress[rank] == last]
    if 2 * len(behind) <= len(stacks):
        return behind
    places = {rank: tuple(FRAME.findall(stack)) for rank, stack in stacks.items()}
    [(common, count)] = Counter(places.values()).most_common(1)
    if 2 * count > len(stacks):
        return [rank for rank, place in places.items() if place != common]
    return []
