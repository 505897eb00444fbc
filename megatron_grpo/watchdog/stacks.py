"""Stacks of main threads as texts: a rank's place in the code, and stragglers."""

import re
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Mapping

FRAME = re.compile(r'File "(.*)", line (\d+), in (.*)')
LIBRARY = re.compile(
    r"/torch/|<frozen |/lib/python3(\.\d+)?/(?!(site|dist)-packages/(megatron_grpo|parallel)/)"
)
"""Path of a file outside of this project."""
WAITS = re.compile(r"/torch/(distributed|cuda)/|/pipeline_parallel/p2p_communication\.py")
"""Frames in which a rank waits for others: torch.distributed, Megatron-Core's waits for pipeline
sends and receives, or, with NCCL, the host's next synchronisation with the device."""


def main_stack() -> str:
    """The stack of this process's main thread, innermost call last as in a traceback."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return "".join(traceback.format_stack(frame)).rstrip()


def place_of(stack: str) -> str:
    """The innermost line of a stack outside of libraries, or else the innermost of all."""
    places: list[tuple[str, str, str]] = FRAME.findall(stack)
    own = [place for place in places if not LIBRARY.search(place[0])]
    file, line, function = (own or places)[-1]
    return f"{file}:{line} in {function}"


def stragglers(stacks: Mapping[int, str], progress: Mapping[int, tuple[int, int]]) -> list[int]:
    """Guess the ranks that the others wait for, from stacks and (step, ticks); may be empty.

    Ranks outside of collectives, if they are at most half; else the ranks with the least progress,
    if at most half; else the ranks whose stack differs from the majority's.
    """
    busy = [rank for rank, stack in stacks.items() if not WAITS.search(stack)]
    if busy and 2 * len(busy) <= len(stacks):
        return busy
    last = min(progress.values())
    behind = [rank for rank in stacks if progress[rank] == last]
    if 2 * len(behind) <= len(stacks):
        return behind
    places = {rank: _functions_of(stack) for rank, stack in stacks.items()}
    [(common, count)] = Counter(places.values()).most_common(1)
    if 2 * count > len(stacks):
        return [rank for rank, place in places.items() if place != common]
    return []


def _functions_of(stack: str) -> tuple[tuple[str, str], ...]:
    return tuple((file, function) for file, _, function in FRAME.findall(stack))
