"""The interface of channels, independent of how the bytes are moved.

A channel goes from one sending process to one receiving process. It has two buffers that are used
in turn: while one is being transferred or read, the other is filled. Each end is used by one thread
at a time.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

NUM_SLOTS = 2
"""Number of buffers of a channel."""


class Channel(Protocol):
    """One end of a channel. Waits raise ChannelError if the other end is closed, dead or
    unresponsive."""

    def next_buffer(self) -> Tensor:
        """Sender: the buffer to fill next, uint8 [bucket_bytes], once its contents are sent."""

    def send_bucket(self, num_bytes: int) -> None:
        """Sender: send the first `num_bytes` of the buffer just filled."""

    def flush(self) -> None:
        """Sender: wait until the receiver is done with everything that was sent."""

    def receive_buckets(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Receiver: the next ``len(sizes)`` buffers, each as its first ``sizes[i]`` bytes, uint8.

        A buffer is valid until the next one is requested. Exhaust the iterator: that tells the
        sender that the last buffer has been read.
        """

    def abort(self) -> None:
        """Make the waits of both ends fail; any thread may call it."""

    def close(self) -> None:
        """End the channel and free its buffers; the other end's waits fail at once."""


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all its work.

    Do not call this while a channel moves bytes: it would also wait for transfers whose peer is
    lost.
    """
    if device.type != "cpu":
        torch.cuda.synchronize(device)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU, run this thread's copies in their own stream; call `synchronize` first.

    Also selects the device: a new thread starts on GPU 0, where restoring its stream would create a
    context of half a gigabyte.
    """
    if device.type == "cpu":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def finish_copies(device: torch.device) -> None:
    """Wait until the copies that this thread started are complete."""
    if device.type != "cpu":
        torch.cuda.current_stream(device).synchronize()
