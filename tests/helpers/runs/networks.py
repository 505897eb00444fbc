"""Slow networks between the hosts of `hosts.py`: a rate, or a distance with latency and loss.

A process forwards the frames of distant hosts: few kernels of virtual machines have netem.
"""

import fcntl
import os
import random
import select
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from helpers.ranks.processes import CONTEXT
from helpers.runs.hosts import CABLE, Host, in_network

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
ENDS = ("near", "far")


@contextmanager
def slow(hosts: Sequence[Host], rate: str) -> Iterator[None]:
    """Limit what each host sends to `rate`, such as 50mbit."""
    for host in hosts:
        shape = ["tbf", "rate", rate, "burst", "32k", "latency", "50ms"]
        host.run("tc", "qdisc", "add", "dev", CABLE, "root", *shape)
    try:
        yield
    finally:
        for host in hosts:
            host.run("tc", "qdisc", "delete", "dev", CABLE, "root")


@contextmanager
def distant(hosts: Sequence[Host], seconds: float, loss: float) -> Iterator[None]:
    """Put a distance between `hosts` and all others: frames arrive after `seconds`, but for a share
    `loss` of them, drawn from a seed, which is lost."""
    switch = hosts[0].switch
    in_network(switch, "ip", "link", "add", "suburb", "type", "bridge")
    in_network(switch, "ip", "link", "set", "suburb", "up")
    for end, bridge in zip(ENDS, ("switch", "suburb"), strict=True):
        in_network(switch, "ip", "tuntap", "add", "dev", end, "mode", "tap")
        in_network(switch, "ip", "link", "set", end, "master", bridge, "up")
    relay = CONTEXT.Process(target=_relay, args=(switch, seconds, loss))
    relay.start()
    try:
        for host in hosts:
            host.plug("suburb")
        yield
    finally:
        for host in hosts:
            host.plug()
        relay.kill()
        relay.join()
        for link in ("suburb", *ENDS):
            in_network(switch, "ip", "link", "delete", link)


def _relay(switch: int, seconds: float, loss: float) -> None:
    """Forward frames between the ends, each of which is a device in the network of `switch`."""
    os.setns(os.pidfd_open(switch), os.CLONE_NEWNET)
    files = [_open_tap(end) for end in ENDS]
    other = dict(zip(files, reversed(files), strict=True))
    draw, waiting = random.Random(0), deque[tuple[float, int, bytes]]()
    while True:
        wait = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for file in select.select(files, [], [], wait)[0]:
            frame = os.read(file, 65536)
            if draw.random() >= loss:
                waiting.append((time.monotonic() + seconds, other[file], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, file, frame = waiting.popleft()
            os.write(file, frame)


def _open_tap(name: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return file
