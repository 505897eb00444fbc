"""Where the main threads of the ranks are, and which of them is not where the others are."""

import re
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Mapping

FRAME = re.compile(r'File "(.*)", line \d+, in (.*)')
WAITS = re.compile(r"/torch/(distributed|cuda)/|/pipeline_parallel/p2p_communication\.py")
"""Where a rank waits for others: Megatron-Core waits for what it sends and receives by itself, and
with NCCL the host waits where it next looks at the device."""


def main_stack() -> str:
    """The stack of this process's main thread, innermost call last, as in a traceback."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return "".join(traceback.format_stack(frame)).rstrip()


def odd_ones_out(stacks: Mapping[int, str], progress: Mapping[int, tuple[int, int]]) -> list[int]:
    """The ranks that the others wait for, as far as stacks and progress tell; else none.

    `progress` is larger the further a rank has come. When most wait for others in a collective,
    those who do not are the cause. Otherwise the ones behind; otherwise those who are at another
    place than most.
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
