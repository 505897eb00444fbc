"""Channels inside one host: two buffers of shared memory that leave nothing behind."""

import gc
import os
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch

from helpers.ranks.processes import running
from parallel.weight_transfer.channels import ChannelError, ChannelSet, Listener, connect
from parallel.weight_transfer.local_channels import LocalChannel

BUCKET = 1 << 20
CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=20)


def sender(pipe):
    waiting = Listener()
    pipe.send(waiting.address)
    channel = LocalChannel(waiting.accept("the receiver", TIMEOUT), BUCKET, CPU, is_sender=True)
    channel.next_buffer().fill_(7)
    channel.send_bucket(BUCKET)
    pipe.send((mapped(), in_shared_memory()))
    pipe.recv()


def receiver(pipe, address):
    channel = LocalChannel(connect(address, "the sender", TIMEOUT), BUCKET, CPU, is_sender=False)
    arrivals = channel.receive_buckets([BUCKET, BUCKET])
    pipe.send(int(next(arrivals).sum()))
    pipe.send((mapped(), in_shared_memory()))
    pipe.recv()


def mapped():
    """Bytes of shared weights that this process maps."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:weights" in line:
            first, last = line.split()[0].split("-")
            total += int(last, 16) - int(first, 16)
    return total


def in_shared_memory():
    """Files in /dev/shm that this process has mapped or open."""
    maps = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    channels = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    return [path for path in (*maps, *channels) if path.startswith("/dev/shm")]


def test_both_ends_map_two_buffers_without_a_name_and_the_socket_ends_with_them():
    with running(sender) as first:
        address = first.hear()
        with running(receiver, address) as second:
            assert second.hear() == 7 * BUCKET
            assert first.hear() == second.hear() == (2 * BUCKET, [])
            assert address in Path("/proc/net/unix").read_text()
            first.kill()
            second.kill()
    assert address not in Path("/proc/net/unix").read_text()


def take_two(channel):
    arrivals = channel.receive_buckets([9, 9])
    first = next(arrivals)  # which the frame holds, and so does the traceback
    return first + next(arrivals)


def test_a_failure_that_has_been_handled_keeps_no_memory():
    gc.collect()  # frees what earlier tests left
    with running(sender) as first:
        control = connect(first.hear(), "the sender", TIMEOUT)

        def use_all():
            channels = ChannelSet()
            opening = partial(LocalChannel, control, BUCKET, CPU, is_sender=False)
            [channel] = channels.open_all([opening])
            first.hear()  # it has sent one buffer
            first.kill()
            with pytest.raises(ChannelError, match="the sender has closed"):
                channels.run_all([partial(take_two, channel)])
            with pytest.raises(ChannelError, match="the channels were closed"):
                channels.run_all([])

        use_all()
    assert mapped() == 0


def test_a_sender_that_dies_before_it_shares_its_memory_is_named():
    waiting = Listener()
    control = connect(waiting.address, "the sender", TIMEOUT)
    waiting.accept("the receiver", TIMEOUT).close()
    with pytest.raises(ChannelError, match="the sender did not share its memory"):
        LocalChannel(control, BUCKET, CPU, is_sender=False)
    control.close()


def test_an_open_channel_costs_each_end_one_file_descriptor():
    gc.collect()  # frees what earlier tests left
    waiting = Listener()
    before = len(os.listdir("/proc/self/fd"))
    control = connect(waiting.address, "the sender", TIMEOUT)
    first = LocalChannel(waiting.accept("the receiver", TIMEOUT), BUCKET, CPU, is_sender=True)
    second = LocalChannel(control, BUCKET, CPU, is_sender=False)
    # The listener is closed.
    assert len(os.listdir("/proc/self/fd")) == before - 1 + 2
    first.close()
    second.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    assert mapped() == 0


def test_a_failure_ends_the_waits_of_other_channels_and_is_raised():
    waiting = Listener()
    control = connect(waiting.address, "the sender", TIMEOUT)  # which takes nothing
    accepted = waiting.accept("the receiver", TIMEOUT)
    channels = ChannelSet()
    [mute] = channels.open_all([partial(LocalChannel, accepted, BUCKET, CPU, is_sender=True)])
    mute.send_bucket(1)

    def fail():
        raise ValueError("ours")

    start = time.monotonic()
    with pytest.raises(ValueError, match="ours"):
        channels.run_all([fail, mute.flush])
    assert time.monotonic() - start < TIMEOUT.total_seconds() / 2
    control.close()


@pytest.mark.parametrize("broken", [0, 1])
def test_all_channels_are_closed_even_when_one_cannot_be(broken):
    controls, opening = [], []
    for _ in range(2):
        waiting = Listener()
        controls.append(connect(waiting.address, "the sender", TIMEOUT))
        accepted = waiting.accept("the receiver", TIMEOUT)
        opening.append(partial(LocalChannel, accepted, BUCKET, CPU, is_sender=True))
    channels = ChannelSet()
    channels.open_all(opening)[broken].close()  # closing it again raises
    with pytest.raises(AttributeError):
        channels.close()
    assert not controls[1 - broken].is_open()
    for control in controls:
        control.close()
