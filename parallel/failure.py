"""The failure of one rank, told to all: so that they go on, or do not, together."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

MAX_TEXT_BYTES = 4096

E = TypeVar("E", bound=Exception)


def first_failure(action: Callable[[], None], device: torch.device, kind: type[E]) -> E | None:
    """Do `action`; the error `kind` of the first rank on which it raised one, on all ranks.

    None when it raised none anywhere. Collective over the default group, after the action.
    """
    failure: E | None = None
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    try:
        action()
    except kind as error:
        # Without its traceback, which would keep alive what the action has made.
        failure = type(error)(str(error))
    first = torch.tensor([num_ranks if failure is None else rank], device=device)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    if first == num_ranks:
        return None
    text = broadcast_text(str(failure), device, source=int(first))
    return failure if first == rank else kind(f"rank {int(first)}: {text}")


def raise_first_failure(action: Callable[[], None], device: torch.device, kind: type[E]) -> None:
    """Do `action`, and raise what `first_failure` finds: on all ranks, or on none."""
    failure = first_failure(action, device, kind)
    if failure is not None:
        raise failure


def broadcast_text(text: str, device: torch.device, source: int = 0) -> str:
    """The `text` of rank `source`, on all ranks of the default group; at most 4 kB arrive."""
    encoded = text.encode()[:MAX_TEXT_BYTES].ljust(MAX_TEXT_BYTES, b"\0")
    words = torch.tensor([*encoded], dtype=torch.uint8, device=device)
    dist.broadcast(words, src=source)
    return bytes(words.tolist()).rstrip(b"\0").decode(errors="ignore")
