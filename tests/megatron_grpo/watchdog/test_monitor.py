"""Who may connect to the monitor, and how it handles invalid messages."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_grpo.watchdog.job import Pace
from megatron_grpo.watchdog.monitor import Monitor
from megatron_grpo.watchdog.wire import LineReader, connect, line
from watched import LIMITS

PACE = Pace(beat=0.2, settle=0.1)


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[Monitor]:
    """The monitor of a job of two ranks."""
    found = Monitor("127.0.0.1", 2, LIMITS, tmp_path / "stacks.txt", PACE)
    yield found
    ranks = [connect(found.address, rank, "here", 1, timeout=5) for rank in range(2)]
    for rank in ranks:
        rank.sendall(line(leaves={"code": 0}))
        rank.close()
    found.join()


def hears(connection: socket.socket, word: str, seconds: float) -> dict | None:
    """The first message that has `word` within so many seconds; None when hung up."""
    connection.settimeout(seconds)
    lines = LineReader()
    with suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            for message in lines.feed(data):
                if word in message:
                    return message
    return None


def test_who_has_not_the_key_is_hung_up_on_and_changes_nothing(monitor):
    stranger = connect(replace(monitor.address, key="guess"), 1, "there", 1, timeout=5)
    stranger.sendall(line(failure={"text": "lie"}))
    assert hears(stranger, "end", 5) is None


def test_noise_is_hung_up_on(monitor):
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\x00\xff\n", line(beat={}), line(rank="x")):
        stranger = socket.create_connection((monitor.address.host, monitor.address.port))
        stranger.sendall(noise)
        assert hears(stranger, "end", 5) is None


def test_the_key_is_said_to_nobody(monitor):
    listener = connect(monitor.address, 0, "here", 1, timeout=5)
    listener.settimeout(0.2)
    said = b""
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        try:
            said += listener.recv(1 << 16)
        except TimeoutError:
            continue
    assert b"beat" in said and monitor.address.key.encode() not in said
    assert "key" not in json.loads(said.splitlines()[0])
    listener.sendall(line(leaves={"code": 0}))  # its end is no death then


def test_a_rank_that_comes_after_a_signal_hears_of_it(monitor):
    first = connect(monitor.address, 0, "here", 1, timeout=5)
    first.sendall(line(preempt=True))
    assert hears(first, "preempt", 5) == {"preempt": True}
    second = connect(monitor.address, 1, "here", 2, timeout=5)
    assert hears(second, "preempt", 5) == {"preempt": True}
    for rank in (first, second):
        rank.sendall(line(leaves={"code": 0}))  # its end is no death then


def test_a_rank_whose_host_no_longer_answers_is_lost_and_the_others_hear_of_it(tmp_path):
    """Linux gives up what it sends there, with ETIMEDOUT, which is no ConnectionError."""
    monitor = Monitor("127.0.0.1", 2, LIMITS, tmp_path / "stacks.txt", PACE)
    first, second = (connect(monitor.address, rank, "here", 1, timeout=5) for rank in range(2))
    assert hears(first, "beat", 5) and hears(second, "beat", 5)
    [lost] = [c.socket for c in monitor._connections.copy() if c.rank == 1]
    lost.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 300)
    with suppress(BlockingIOError):  # the kernels take no more while nobody reads
        while True:
            lost.send(b"x" * (1 << 20))
    end = hears(first, "end", 5)
    assert end is not None and "rank 1 on here (pid 1) died" in end["end"]["text"]
    for rank in (first, second):
        rank.close()
    monitor.join()
