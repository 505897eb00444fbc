"""Packs the arrivals of a channel into buffers of equal size."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from parallel.weight_transfer.channels import NUM_SLOTS

ALIGNMENT = 16
"""Bytes; alignment lets a GPU copy several elements at a time."""
BUCKET_STEP = 64 * 1024
"""Bytes; bucket sizes are multiples of it."""


@dataclass(frozen=True)
class Bucket:
    """Consecutive arrivals: index of the first, start of each in bytes, and end of the last."""

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
    """Channels of the process with most of them.

    `senders` are the trainer ranks that send to each worker. A trainer rank has a channel to each
    of its workers; a worker has one from each of its ranks and, except in the last engine, another
    one for each to forward it.
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
