"""How what arrives over a link is packed into buffers of one size."""

from collections.abc import Sequence
from dataclasses import dataclass

from parallel.transport.links import NUM_SLOTS

ALIGNMENT = 16
"""Bytes; a GPU copies aligned elements several at a time."""
BUCKET_STEP = 64 * 1024
"""Bytes; buckets are a multiple of it."""


@dataclass(frozen=True)
class Bucket:
    """Successive arrivals: number of the first, where each begins and the last ends (bytes)."""

    first: int
    offsets: tuple[int, ...]
    num_bytes: int


def bucketed(sizes: Sequence[int], bucket_bytes: int) -> list[Bucket]:
    """Pack arrivals of `sizes` bytes, none more than `bucket_bytes`, in order.

    Both ends of a link compute it from the same sizes.
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


def bucket_bytes_for(
    limit_bytes: int, senders: Sequence[Sequence[int]], num_engines: int, shard_bytes: int
) -> int:
    """Bytes of a bucket with which no process has more than `limit_bytes` in its links' buffers.

    Nor has a bucket more than `shard_bytes`, what the largest of the workers holds, in 64 KiB.
    `senders` are, by worker, the trainer ranks that send to it. A trainer rank has a link to each
    of its workers; a worker has one from each of its ranks, and, unless it is the last engine's,
    one more to pass it on. Raises ValueError, with the least legal limit, where a bucket would have
    less than 64 KiB.
    """
    by_rank: dict[int, int] = {}
    for ranks in senders:
        for rank in ranks:
            by_rank[rank] = by_rank.get(rank, 0) + 1
    by_worker = max(map(len, senders)) * (2 if num_engines > 1 else 1)
    num_links = max(by_worker, *by_rank.values())
    steps = limit_bytes // (NUM_SLOTS * num_links * BUCKET_STEP)
    if not steps:
        least = NUM_SLOTS * num_links * BUCKET_STEP
        raise ValueError(
            f"{limit_bytes} bytes are too few for {NUM_SLOTS} buffers of each of the {num_links} "
            f"links of one process: at least {least} are needed ({BUCKET_STEP} a buffer)"
        )
    return min(steps, -(-shard_bytes // BUCKET_STEP)) * BUCKET_STEP
