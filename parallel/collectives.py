"""Exchanges between all ranks: the failure of one, rank 0's result, a quantile.

They communicate over the CPU (`quantile`, and `any_rank` on request, on the device of the values):
a GPU that waits in a collective is busy.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

MAX_TEXT_BYTES = 4096


def first_failure[E: Exception](action: Callable[[], None], kind: type[E]) -> E | None:
    """Run `action`; returns, on all ranks, the lowest failing rank's error of type `kind`, or None.

    The error keeps the text and, for an OSError, the `errno`. Collective over the default group,
    after the action.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    first, text, number = torch.tensor(num_ranks), "", torch.tensor(0)
    try:
        action()
    except kind as error:
        # Keep only the text: the error's traceback would keep the action's objects alive.
        first, text = torch.tensor(rank), str(error)
        if isinstance(error, OSError):
            number = torch.tensor(error.errno or 0)
    # Failed ranks take part, too: the others would wait for them.
    dist.all_reduce(first, dist.ReduceOp.MIN)
    source = int(first)
    if source == num_ranks:
        return None
    message = broadcast_text(text, source)
    dist.broadcast(number, src=source)
    failure = kind(text if rank == source else f"rank {source}: {message}")
    if isinstance(failure, OSError):
        failure.errno = int(number) or None
    return failure


def raise_first_failure[E: Exception](action: Callable[[], None], kind: type[E]) -> None:
    """Run `action`, and raise the error of `first_failure`, if any, on all ranks."""
    failure = first_failure(action, kind)
    if failure is not None:
        raise failure


def on_rank_0[Z, T](
    zero: Z | None, call: Callable[[Z], T], raises: tuple[type[Exception], ...]
) -> T | None:
    """Call ``call(zero)`` on rank 0, which alone has `zero`; returns the result there, else None.

    An exception of a type in `raises` is raised on all ranks, with its text; any other ends rank 0
    alone. Collective over the default group, after the call. The other ranks wait on the CPU: rank
    0 may need their GPUs to generate.
    """
    result, error = None, None
    if zero is not None:
        try:
            result = call(zero)
        except raises as raised:
            error = raised
    found = [i for i, kind in enumerate(raises) if isinstance(error, kind)]
    number = torch.tensor(found[0] if found else len(raises))
    dist.broadcast(number, src=0)
    if number < len(raises):
        text = broadcast_text(str(error))
        raise error or raises[int(number)](text)
    return result


def any_rank(condition: bool, device: torch.device | str = "cpu") -> bool:
    """Whether `condition` is true on any rank; collective over the default group."""
    flag = torch.tensor(int(condition), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def wait_for_rank_0() -> None:
    """Return on all ranks when rank 0 has called this; waits on the CPU."""
    dist.broadcast(torch.zeros(1), src=0)


def wait_for_all() -> None:
    """Return on all ranks when all have called this; waits on the CPU."""
    dist.all_reduce(torch.zeros(1))


def broadcast_text(text: str, source: int = 0) -> str:
    """The `text` of rank `source`, on all ranks of the default group; cut off after 4 kB."""
    encoded = text.encode()[:MAX_TEXT_BYTES].ljust(MAX_TEXT_BYTES, b"\0")
    words = torch.tensor([*encoded], dtype=torch.uint8)
    dist.broadcast(words, src=source)
    # The cut may have split a character: ignore the rest of it.
    return bytes(words.tolist()).rstrip(b"\0").decode(errors="ignore")


def quantile(values: Tensor, q: float, group: dist.ProcessGroup) -> float:
    """The `q`-quantile of the numbers of all ranks of `group`, interpolated like torch.quantile.

    `values` [n] are finite, and become float32; n may differ between ranks, and be 0. Returns -inf
    if no rank has a number. Every rank holds all numbers for a moment.
    """
    counts = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=values.device)
    dist.all_gather_single(counts, counts.new_tensor([len(values)]), group=group)
    total, most = int(counts.sum()), int(counts.max())
    if not total:
        return -math.inf
    # The collective needs equal sizes. Infinite padding comes last in the sort below.
    padded = values.new_full((most,), math.inf, dtype=torch.float32)
    padded[: len(values)] = values
    gathered = padded.new_empty(len(counts) * most)
    dist.all_gather_single(gathered, padded, group=group)
    ordered = gathered.sort().values
    position = q * (total - 1)
    low, high = (float(ordered[place]) for place in (math.floor(position), math.ceil(position)))
    return low + (position - math.floor(position)) * (high - low)
