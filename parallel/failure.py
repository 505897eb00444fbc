"""The failure of one rank, told to all: so that they go on, or do not, together.

Over the CPU: a GPU that waits for a collective is busy.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

MAX_TEXT_BYTES = 4096

E = TypeVar("E", bound=Exception)


def first_failure(action: Callable[[], None], kind: type[E]) -> E | None:
    """Do `action`; the error `kind` of the first rank on which it raised one, on all ranks.

    It has the text of that one and, where it is an OSError, its `errno`. None when it raised none
    anywhere. Collective over the default group, after the action.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    first, text, number = torch.tensor(num_ranks), "", torch.tensor(0)
    try:
        action()
    except kind as error:
        # Not the error: its traceback would keep alive what the action has made.
        first, text = torch.tensor(rank), str(error)
        if isinstance(error, OSError):
            number = torch.tensor(error.errno or 0)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    source = int(first)
    if source == num_ranks:
        return None
    told = broadcast_text(text, source)
    dist.broadcast(number, src=source)
    failure = kind(text if rank == source else f"rank {source}: {told}")
    if isinstance(failure, OSError):
        failure.errno = int(number) or None
    return failure


def raise_first_failure(action: Callable[[], None], kind: type[E]) -> None:
    """Do `action`, and raise what `first_failure` finds: on all ranks, or on none."""
    failure = first_failure(action, kind)
    if failure is not None:
        raise failure


def broadcast_text(text: str, source: int = 0) -> str:
    """The `text` of rank `source`, on all ranks of the default group; at most 4 kB arrive."""
    encoded = text.encode()[:MAX_TEXT_BYTES].ljust(MAX_TEXT_BYTES, b"\0")
    words = torch.tensor([*encoded], dtype=torch.uint8)
    dist.broadcast(words, src=source)
    return bytes(words.tolist()).rstrip(b"\0").decode(errors="ignore")
