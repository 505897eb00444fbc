"""The data of one channel in a push: boxes of tensors, packed into buckets and unpacked."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from parallel.checksum import BoxCopy, NamedSum, copied_and_summed
from parallel.layout import Box, Copy, Shape
from parallel.views import as_local, as_whole
from parallel.weight_transfer.channels import NUM_SLOTS, Channel, own_stream

ALIGNMENT = 16
"""Bytes; aligned boxes let a GPU copy several elements at a time."""
BUCKET_STEP = 64 * 1024
"""Bytes; bucket sizes are multiples of it."""


@dataclass(frozen=True)
class Bucket:
    """Consecutive arrivals: index of the first, start of each, and end of the last, in bytes."""

    first: int
    offsets: tuple[int, ...]
    num_bytes: int


def bucketed(sizes: Sequence[int], bucket_bytes: int) -> list[Bucket]:
    """Pack arrivals of `sizes` bytes, each at most `bucket_bytes`, in order.

    Both ends of a channel compute the same buckets from the same sizes.
    """
    buckets: list[Bucket] = []
    first, offsets, end = 0, list[int](), 0
    for number, size in enumerate(sizes):
        assert size <= bucket_bytes, f"{size} bytes at once exceed a bucket of {bucket_bytes}"
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        if offsets and offset + size > bucket_bytes:
            buckets.append(Bucket(first, tuple(offsets), end))
            first, offsets, offset = number, [], 0
        offsets.append(offset)
        end = offset + size
    if offsets:
        buckets.append(Bucket(first, tuple(offsets), end))
    return buckets


def most_channels(senders: Sequence[Sequence[int]], num_engines: int) -> int:
    """Number of channels of the process that has most.

    `senders` are the trainer ranks that send to each worker. A trainer rank has a channel to each
    of its workers; a worker has a channel from each of its ranks and, except in the last engine, as
    many again to the next engine.
    """
    of_workers = max(map(len, senders)) * min(num_engines, 2)
    return max(of_workers, *Counter(chain.from_iterable(senders)).values())


def bucket_bytes_for(
    limit_bytes: int, senders: Sequence[Sequence[int]], num_engines: int, shard_bytes: int
) -> int:
    """The largest bucket size such that no process exceeds `limit_bytes` in its channels' buffers.

    It is a multiple of 64 KiB, and at most `shard_bytes`, the size of the largest worker's shard,
    rounded up to 64 KiB. Raises ValueError, with the smallest legal limit, if a bucket would be
    smaller than 64 KiB.
    """
    num_channels = most_channels(senders, num_engines)
    least = NUM_SLOTS * num_channels * BUCKET_STEP
    if limit_bytes < least:
        raise ValueError(
            f"{limit_bytes} bytes are too few for {NUM_SLOTS} buffers for each of the "
            f"{num_channels} channels of one process: at least {least} bytes are needed "
            f"({BUCKET_STEP} per buffer)"
        )
    return min(limit_bytes // least, -(-shard_bytes // BUCKET_STEP)) * BUCKET_STEP


class Packing:
    """Places of boxes, each in its dtype, in the buffers of a channel; equal at both ends.

    Raises ValueError if a box is larger than a buffer.
    """

    def __init__(
        self, boxes: Sequence[Box], dtypes: Sequence[torch.dtype], bucket_bytes: int
    ) -> None:
        sizes = [
            box.num_elements * dtype.itemsize for box, dtype in zip(boxes, dtypes, strict=True)
        ]
        if max(sizes, default=0) > bucket_bytes:
            raise ValueError(f"{max(sizes)} bytes in one piece exceed a bucket of {bucket_bytes}")
        self.num_bytes, self._sizes = sum(sizes), sizes
        self.buckets = bucketed(sizes, bucket_bytes)
        self._boxes, self._dtypes = boxes, dtypes

    def views(self, bucket: Bucket, buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yields number and view of each box in a buffer."""
        for number, offset in enumerate(bucket.offsets, bucket.first):
            data = buffer[offset : offset + self._sizes[number]].view(self._dtypes[number])
            yield number, data.view(self._boxes[number].size)


@dataclass(frozen=True)
class OutStream:
    """The sending end of one channel of a trainer rank."""

    channel: Channel
    copies: Sequence[Copy]
    shapes: Mapping[str, Shape]
    """Shapes of the receiver's parameters."""
    packing: Packing
    """Places of the destinations of `copies`."""
    device: torch.device

    def send_boxes(self, tensors: Mapping[str, Tensor]) -> list[NamedSum]:
        """Send the boxes of `tensors`; returns when the receiver has taken them.

        Returns contributions to the checksums of parameters, computed in the engines' dtype before
        the buffer is sent.
        """
        sums: list[NamedSum] = []
        with own_stream(self.device), torch.inference_mode():
            for bucket in self.packing.buckets:
                buffer = self.channel.next_buffer()
                sums += copied_and_summed(self._box_copies(bucket, buffer, tensors))
                self.channel.send_bucket(bucket.num_bytes)
            self.channel.flush()
        return sums

    def _box_copies(
        self, bucket: Bucket, buffer: Tensor, tensors: Mapping[str, Tensor]
    ) -> Iterator[BoxCopy]:
        for number, target in self.packing.views(bucket, buffer):
            copy = self.copies[number]
            name, box = copy.destination, copy.destination_box
            source = tensors[copy.source][copy.source_box.slices]
            if copy.source_axes or copy.destination_axes:  # dimensions differ between the two
                whole = as_whole(source, copy.source_axes)
                source = as_local(whole, copy.destination_axes, len(box.size))
            yield BoxCopy(name, source, target, box, self.shapes[name])


@dataclass(frozen=True)
class InStream:
    """The receiving end of one channel of a worker, which forwards what arrives."""

    channel: Channel
    onward: Channel | None
    """The channel to the same worker of the next engine, if there is one."""
    arrivals: Sequence[tuple[str, Box]]
    packing: Packing
    device: torch.device

    def receive_boxes(self, parameters: Mapping[str, Tensor]) -> None:
        """Fill the boxes of `parameters`; returns when the next engine has taken them, too."""
        buckets = self.packing.buckets
        buffers = self.channel.receive_buckets([bucket.num_bytes for bucket in buckets])
        # The parameters may be inference tensors, which can be written only in inference mode, or
        # views of tensors that require gradients, which autograd refuses to read once it knows of a
        # change (`.data` hides it).
        with own_stream(self.device), torch.inference_mode():
            # `zip` exhausts `buffers`, which tells the sender that the last one has been read.
            for buffer, bucket in zip(buffers, buckets, strict=True):
                # Forwarded first: the next engine receives while this one fills its parameters.
                if self.onward is not None:
                    self.onward.next_buffer()[: bucket.num_bytes].copy_(buffer)
                    self.onward.send_bucket(bucket.num_bytes)
                for number, values in self.packing.views(bucket, buffer):
                    name, box = self.arrivals[number]
                    parameters[name].data[box.slices].copy_(values)
            if self.onward is not None:
                self.onward.flush()
