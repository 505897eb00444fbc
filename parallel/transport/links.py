"""What all links have in common, whatever carries the bytes.

A link goes from one sending process to one receiving process. It has two buffers that are used in
turn: while one is on its way or being read, the other is filled. Each end is used by one thread at
a time.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

NUM_SLOTS = 2
"""Buffers of a link."""


class Link(Protocol):
    """One end of a link. Its waits raise LinkError when the other end is closed, dead or mute."""

    def abort(self) -> None:
        """Let the waits of both ends fail; any thread may call it."""

    def close(self) -> None:
        """End the link and free its buffers; the other end's waits fail at once."""


class Outgoing(Link, Protocol):
    """The sender's end."""

    def next_buffer(self) -> Tensor:
        """The buffer to fill next, uint8 [bucket_bytes], once what was in it has gone."""

    def hand_over(self, num_bytes: int) -> None:
        """Send the first `num_bytes` of the buffer just filled."""

    def flush(self) -> None:
        """Wait until the receiver is done with everything that was handed over."""


class Incoming(Link, Protocol):
    """The receiver's end."""

    def arrivals(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Of the buffers that come next their first bytes, uint8, `sizes` by number.

        One is valid until the next is asked for; the end says that the last is done with.
        """


def settle(device: torch.device) -> None:
    """Wait until all that a GPU has been told to do is done.

    Not to be called while a link moves bytes: what waits for a lost end would be waited for.
    """
    if device.type != "cpu":
        torch.cuda.synchronize(device)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU, let this thread's copies run in a queue of their own; `settle` comes before.

    A thread begins on GPU 0, where to go back to would make a context of half a gigabyte.
    """
    if device.type == "cpu":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def finish_copies(device: torch.device) -> None:
    """Wait until the copies that this thread began have been made."""
    if device.type != "cpu":
        torch.cuda.current_stream(device).synchronize()
