"""Arrivals are packed into buckets in order, without overlap and within bounds."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.weight_transfer.streams import ALIGNMENT, BUCKET_STEP, bucket_bytes_for, bucketed


@given(st.lists(st.integers(0, 200)), st.integers(200, 500))
def test_every_arrival_is_in_one_bucket_in_order_and_aligned(sizes, bucket_bytes):
    buckets = bucketed(sizes, bucket_bytes)
    number = 0
    for bucket in buckets:
        assert bucket.first == number
        end = 0
        for offset in bucket.offsets:
            assert offset % ALIGNMENT == 0 and 0 <= offset - end < ALIGNMENT
            end = offset + sizes[number]
            number += 1
        assert bucket.offsets and bucket.num_bytes == end <= bucket_bytes
    assert number == len(sizes)


@given(st.lists(st.integers(0, 200), min_size=1), st.integers(200, 500))
def test_a_bucket_ends_only_where_the_next_arrival_does_not_fit(sizes, bucket_bytes):
    buckets = bucketed(sizes, bucket_bytes)
    for bucket, following in pairwise(buckets):
        assert bucket.num_bytes + sizes[following.first] > bucket_bytes - ALIGNMENT


def test_an_arrival_larger_than_a_bucket_is_refused():
    with pytest.raises(AssertionError, match="101 bytes at once exceed a bucket of 100"):
        bucketed([5, 101], 100)


@pytest.mark.parametrize(
    ("senders", "num_engines", "channels"),
    [
        ([[0]], 1, 1),
        ([[0], [0], [0]], 1, 3),  # limited by the rank
        ([[0, 1, 2], [3]], 1, 3),  # limited by the first worker
        ([[0, 1, 2], [3]], 2, 6),  # the first worker also forwards
        ([[0]] * 5, 9, 5),
    ],
)
def test_no_process_has_more_buffers_than_the_limit(senders, num_engines, channels):
    limit = 10_000_000
    size = bucket_bytes_for(limit, senders, num_engines, shard_bytes=2 * limit)
    assert size % BUCKET_STEP == 0
    assert size * 2 * channels <= limit < (size + BUCKET_STEP) * 2 * channels


def test_a_limit_that_is_too_low_is_refused_with_the_lowest_legal_one():
    senders = [[0, 1, 2], [3]]
    with pytest.raises(ValueError, match=r"393215 bytes .* the 3 channels .* at least 393216 "):
        bucket_bytes_for(393215, senders, 1, 10**9)
    assert bucket_bytes_for(393216, senders, 1, 10**9) == 64 * 1024


def test_a_bucket_is_no_larger_than_a_workers_parameters():
    assert bucket_bytes_for(10**9, [[0]], 1, shard_bytes=1) == BUCKET_STEP
    assert bucket_bytes_for(10**9, [[0]], 1, shard_bytes=BUCKET_STEP + 1) == 2 * BUCKET_STEP
